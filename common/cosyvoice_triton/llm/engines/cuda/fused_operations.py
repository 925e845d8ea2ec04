"""The parts of the network by fused kernels on a GPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cosyvoice_triton import kernels
from cosyvoice_triton.kernels.tiles import ProductTile, decoder_tma, tiles
from cosyvoice_triton.llm.engines.cuda.operations import FAULT, NOTHING, AttentionMetadata, Plain, Requests, Residual

MAX_TILES = 1024  # of a product of few tokens


class Fused(Plain):
    """Operations by fused kernels, for one thread and one stream.

    A layer of few tokens takes the time that its weights take to be read: it is five or six kernels of our own. One of
    many tokens is eight or nine kernels, three or four of which are products of cuBLAS.
    """

    def __init__(self, device: torch.device) -> None:
        self._arrived = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)

    def begin(self, requests: Requests, batch: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor, Residual]:
        cast = _tma_tiles(len(batch), embedding.dtype) is not None
        slots, positions, x, for_tma = kernels.begin(
            batch, requests.ended, requests.numbers, requests.steps, embedding, cast=cast
        )
        return slots, positions, Residual(x, for_tma=for_tma)

    def project_heads(
        self, x: Residual, weight: Tensor, bias: Tensor, eps: float, metadata: AttentionMetadata, layer: int
    ) -> Tensor:
        keys, values = metadata.keys[layer], metadata.values[layer]
        where = keys, values, metadata.block_tables, metadata.slots, metadata.positions, metadata.rotary
        if x.for_tma and (few := _tma_tiles(len(x.x), weight.dtype)):
            return kernels.project_heads_tma(*x.for_tma, weight, bias, eps, *where, few[0])
        if tile := tiles(weight.dtype).decoder_heads.of(len(x.x)):
            return kernels.project_heads(x.x, weight, bias, eps, *where, tile)
        return kernels.apply_rope(F.linear(_normed(x, eps, weight.dtype), weight, bias), *where)

    def attend(self, q: Tensor, metadata: AttentionMetadata, layer: int) -> Tensor:
        keys, values = metadata.keys[layer], metadata.values[layer]
        return kernels.attend_pages(
            q, keys, values, metadata.block_tables, metadata.slots, metadata.positions, metadata.consecutive
        )

    def linear_residual(self, y: Tensor, weight: Tensor, x: Residual, eps: float) -> None:
        x.normed = x.for_tma = None
        if tile := tiles(weight.dtype).decoder_added.of(len(y)):
            cast = _tma_tiles(len(y), weight.dtype) is not None
            x.for_tma = kernels.linear_residual(y, weight, x.x, self._arrived, tile, cast=cast)
        else:
            x.normed = kernels.rms_norm(x.x, eps, weight.dtype, F.linear(y, weight))

    def gated(self, x: Residual, weight: Tensor, eps: float) -> Tensor:
        if x.for_tma and (few := _tma_tiles(len(x.x), weight.dtype)):
            return kernels.gated_tma(*x.for_tma, weight, eps, few[1])
        if tile := tiles(weight.dtype).decoder_gated.of(len(x.x)):
            return kernels.gated(x.x, weight, eps, tile)
        normed = _normed(x, eps, weight.dtype)
        if fetched := decoder_tma(weight.dtype):
            return kernels.gated_tma(normed, None, weight, eps, fetched.many(len(x.x)))
        return kernels.silu_and_mul(F.linear(normed, weight))

    def head(self, x: Residual, weight: Tensor, eps: float) -> Tensor:
        tile = tiles(weight.dtype).decoder_logits.of(len(x.x))
        assert tile is not None  # for any number of tokens
        return kernels.rms_norm_linear(x.x, weight, eps, tile)

    def sample(self, logits: Tensor, requests: Requests, slots: Tensor) -> None:
        of, sampler = requests, requests.sampler
        kernels.sample(
            logits, sampler.bias, sampler.seen, sampler.recent, of.numbers, of.sampling, of.ends, of.ended, slots,
            of.steps, of.ring, of.first, NOTHING, FAULT,
        )  # fmt: skip


def _normed(x: Residual, eps: float, dtype: torch.dtype) -> Tensor:
    return kernels.rms_norm(x.x, eps, dtype) if x.normed is None else x.normed


def _tma_tiles(T: int, dtype: torch.dtype) -> tuple[ProductTile, ProductTile] | None:
    """Return the tiles of heads and gates whose weights TMA fetches; None if others are faster or there is no TMA."""
    fetched = decoder_tma(dtype)
    return fetched.few(T) if fetched else None
