"""Block sizes, warps and pipeline stages of the kernels: one table for all architectures.

Triton computes matrix products of 16-bit numbers on tensor cores if the GPU's compute capability is at least 8.0. Other
products, those of float32 and all of 7.5, are single multiply-adds (FMA): each thread keeps its operands in registers,
so a tile must be small and not deep, or they spill to memory.
"""

from typing import NamedTuple

import torch

from cosyvoice_triton.kernels.launch import architecture, cdiv, next_power_of_2

FEW_ROWS = 128  # products of at most so many rows use small tiles: large ones would leave multiprocessors idle
MANY_ROWS = 512  # products of more rows use tiles of 128 rows
PROGRAMS = 80  # a kernel of fewer tiles of 64 rows is faster in smaller tiles
WIDE_WEIGHT = 1 << 20  # values; larger weights occupy the multiprocessors with half of FEW_ROWS
FEW_QUERIES = 1024  # attention to at most so many queries uses small tiles
FIRST_TENSOR_CORES = 80  # compute capability 8.0
FIRST_TMA = 90  # compute capability 9.0: the tensor memory accelerator (TMA) fetches tiles, not the threads
TMA_PROGRAMS = 96  # with fewer programs, smaller tiles are faster


def is_few(rows: int, values: int) -> bool:
    """Return whether a product of that many rows with a weight of that many values uses small tiles."""
    return rows <= (FEW_ROWS if values <= WIDE_WEIGHT else FEW_ROWS // 2)


class ProductTile(NamedTuple):
    """The part of a matrix product that one program computes: rows x columns, `depth` terms of each sum at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


class AttentionTile(NamedTuple):
    """The part of attention that one program computes: this many queries, over this many keys at a time."""

    queries: int
    keys: int
    warps: int
    stages: int


class DecoderTiles(NamedTuple):
    """Tiles of one of a decoder's products, by the number of tokens. None means that cuBLAS is faster."""

    one: ProductTile  # or two tokens: without tensor cores
    few: ProductTile  # up to 16
    many: ProductTile | None = None  # up to 64
    most: ProductTile | None = None

    def of(self, T: int) -> ProductTile | None:
        """Return the tile for T tokens."""
        if T <= 2:
            return self.one
        if T <= 16:
            return self.few
        return self.many if T <= 64 else self.most


class TmaDecoderTiles(NamedTuple):
    """Tiles of a decoder's products that TMA fetches."""

    heads: ProductTile  # for few tokens, at most as many as rows; its columns are a head
    gated: tuple[ProductTile, ...]  # for few tokens: the first that has as many rows
    gated_many: ProductTile
    gated_most: ProductTile

    def few(self, T: int) -> tuple[ProductTile, ProductTile] | None:
        """Return the tiles of heads and of gates for T tokens; None if TMA is not faster for so many: 1, 2 or many."""
        if not 2 < T <= self.heads.rows:
            return None
        rows = max(16, next_power_of_2(T))
        gated = next(tile for tile in self.gated if tile.rows >= rows)
        return self.heads._replace(rows=rows), gated._replace(rows=rows)

    def many(self, T: int) -> ProductTile:
        """Return the tile of gates for more tokens."""
        return self.gated_many if T <= MANY_ROWS else self.gated_most


class Tiles(NamedTuple):
    """Tiles by the size of the work; those of heads have a head's width instead of `columns`."""

    few: ProductTile
    few_wide: ProductTile  # also of heads
    heads: ProductTile
    many_heads: ProductTile
    small: ProductTile
    medium: ProductTile
    large: ProductTile
    deep: ProductTile
    paged_few: AttentionTile
    blocks_few: AttentionTile
    queries: AttentionTile
    relative: AttentionTile  # as many queries as keys
    convolution_few: ProductTile
    convolution: ProductTile
    decoder_heads: DecoderTiles  # these two have two products in a tile
    decoder_gated: DecoderTiles
    decoder_added: DecoderTiles  # products that are added to the residual stream
    decoder_logits: DecoderTiles
    decoder_tma: TmaDecoderTiles | None
    vocoder: tuple[ProductTile, ...]  # the largest first
    tma: tuple[ProductTile, ...]  # that TMA fetches; the largest first

    def linear(self, M: int, N: int, K: int, D: int) -> ProductTile:
        """Return the tile for a product (M, K) x (K, N). D is the width of a head if a tile is one head, else 0."""
        if is_few(M, N * K):
            tile = self.few_wide if D or N > 1024 else self.few
        elif D:
            tile = self.heads if M <= 1024 else self.many_heads
        elif M * N <= 512 * 512:
            tile = self.small
        elif M * N <= 4096 * 512:
            tile = self.medium
        else:
            tile = self.deep if K >= 1536 and M >= 4096 else self.large
        return tile._replace(columns=D) if D else tile

    def linear_tma(self, M: int, N: int, D: int) -> ProductTile | None:
        """Return the largest tile by TMA that occupies the GPU, or None if tiles that threads fetch are faster."""
        part = N // 3 if D else N  # queries, keys or values
        for tile in self.tma:
            whole_heads = not D or (tile.columns % D == 0 and part % tile.columns == 0)
            if whole_heads and cdiv(M, tile.rows) * cdiv(N, tile.columns) >= TMA_PROGRAMS:
                return tile
        return None

    def grouped_convolution(self, M: int, G: int) -> ProductTile:
        """Return the tile for a convolution of M frames, in groups of G channels."""
        tile = self.convolution_few if M <= FEW_ROWS else self.convolution
        return tile._replace(columns=min(tile.columns, G), depth=min(tile.depth, G))

    def frames(self, B: int, T: int, N: int, branches: int) -> ProductTile:
        """Return the largest tile that occupies the GPU, for the vocoder's convolutions of (B, T) frames to N channels.

        A large tile does more work for what it reads, and has to occupy the GPU more evenly.
        """
        for tile in self.vocoder:
            columns = max(16, min(tile.columns, next_power_of_2(N)))
            if B * cdiv(T, tile.rows) * cdiv(N, columns) * branches >= PROGRAMS * tile.rows // 64:
                break
        return tile._replace(columns=columns)

    def paged(self, queries: int) -> AttentionTile:
        """Return the tile for `attend_paged`."""
        return self.paged_few if queries <= FEW_QUERIES // 4 else self.queries

    def blocks(self, queries: int) -> AttentionTile:
        """Return the tile for `attend_blocks`."""
        return self.blocks_few if queries <= FEW_QUERIES else self.queries


# The best of those measured on an H200. Each fits the shared memory of the smallest architecture, 99 KiB.
TENSOR_CORES = Tiles(
    few=ProductTile(16, 32, 128, 4, 4),
    few_wide=ProductTile(16, 64, 128, 4, 4),
    heads=ProductTile(64, 64, 64, 4, 3),
    many_heads=ProductTile(128, 64, 64, 8, 3),
    small=ProductTile(64, 32, 64, 4, 4),
    medium=ProductTile(64, 64, 64, 4, 4),
    large=ProductTile(128, 128, 64, 8, 3),
    deep=ProductTile(128, 256, 64, 8, 3),
    paged_few=AttentionTile(16, 64, 4, 3),
    blocks_few=AttentionTile(32, 64, 4, 3),
    queries=AttentionTile(64, 64, 4, 3),
    relative=AttentionTile(32, 32, 2, 3),
    convolution_few=ProductTile(16, 64, 64, 4, 4),  # these two are not tuned
    convolution=ProductTile(64, 64, 64, 4, 4),
    decoder_heads=DecoderTiles(ProductTile(1, 4, 1024, 8, 1), ProductTile(16, 16, 128, 2, 4)),
    decoder_gated=DecoderTiles(ProductTile(1, 4, 1024, 4, 1), ProductTile(16, 64, 64, 4, 4)),
    decoder_added=DecoderTiles(
        ProductTile(1, 4, 1024, 8, 1), ProductTile(16, 32, 64, 2, 6), ProductTile(64, 16, 128, 4, 4)
    ),
    decoder_logits=DecoderTiles(
        ProductTile(1, 4, 1024, 8, 1),
        ProductTile(16, 32, 64, 2, 6),
        ProductTile(64, 64, 64, 4, 4),
        ProductTile(64, 64, 64, 4, 4),
    ),
    decoder_tma=TmaDecoderTiles(
        heads=ProductTile(64, 64, 128, 4, 4),
        gated=(ProductTile(32, 32, 128, 4, 4), ProductTile(64, 32, 128, 4, 3)),
        gated_many=ProductTile(64, 64, 64, 4, 3),
        gated_most=ProductTile(128, 64, 64, 4, 3),
    ),
    vocoder=(ProductTile(128, 128, 64, 8, 3), ProductTile(64, 64, 128, 4, 3), ProductTile(64, 32, 128, 4, 4)),
    tma=(ProductTile(128, 128, 64, 8, 3), ProductTile(64, 128, 64, 4, 4), ProductTile(64, 64, 64, 4, 4)),
)
# The largest of those tried that spill no registers or hardly any; not yet tuned on a GPU.
MULTIPLY_ADD = Tiles(
    few=ProductTile(16, 32, 16, 4, 1),
    few_wide=ProductTile(16, 64, 16, 4, 1),
    heads=ProductTile(64, 64, 16, 8, 1),
    many_heads=ProductTile(64, 64, 16, 8, 1),
    small=ProductTile(64, 32, 16, 4, 1),
    medium=ProductTile(64, 64, 16, 8, 1),
    large=ProductTile(64, 64, 16, 8, 1),
    deep=ProductTile(64, 64, 16, 8, 1),
    paged_few=AttentionTile(16, 32, 4, 1),
    blocks_few=AttentionTile(32, 32, 8, 1),
    queries=AttentionTile(32, 32, 8, 1),
    relative=AttentionTile(32, 32, 8, 1),
    convolution_few=ProductTile(16, 32, 16, 4, 1),
    convolution=ProductTile(64, 32, 16, 4, 1),
    decoder_heads=DecoderTiles(ProductTile(1, 4, 1024, 4, 1), ProductTile(16, 16, 32, 4, 1)),
    decoder_gated=DecoderTiles(ProductTile(1, 4, 1024, 4, 1), ProductTile(16, 16, 32, 4, 1)),
    decoder_added=DecoderTiles(ProductTile(1, 4, 1024, 4, 1), ProductTile(16, 16, 32, 4, 1)),
    decoder_logits=DecoderTiles(
        ProductTile(1, 4, 1024, 4, 1),
        ProductTile(16, 16, 32, 4, 1),
        ProductTile(32, 32, 16, 4, 1),
        ProductTile(32, 32, 16, 4, 1),
    ),
    decoder_tma=None,
    vocoder=(ProductTile(64, 32, 16, 4, 1),),  # serving leaves these products to cuDNN
    tma=(),
)


def uses_tensor_cores(dtype: torch.dtype) -> bool:
    """Return whether Triton computes products of that type on the current GPU's tensor cores."""
    return dtype != torch.float32 and architecture() >= FIRST_TENSOR_CORES


def uses_tma() -> bool:
    """Return whether the current GPU has TMA."""
    return architecture() >= FIRST_TMA


def tiles(dtype: torch.dtype) -> Tiles:
    """Return the tiles for operands of that type on the current GPU."""
    return TENSOR_CORES if uses_tensor_cores(dtype) else MULTIPLY_ADD


def decoder_tma(dtype: torch.dtype) -> TmaDecoderTiles | None:
    """Return the tiles of a decoder's products that TMA fetches, or None if the GPU has none for that type."""
    return tiles(dtype).decoder_tma if uses_tma() else None
