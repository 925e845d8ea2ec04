"""The parts of the network by fused kernels, on a GPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cosyvoice_triton import kernels
from cosyvoice_triton.kernels.tiles import ProductTile, decoder_tma, tiles
from cosyvoice_triton.llm.engines.cuda.operations import FAULT, NOTHING, Places, Requests, Residual

MOST_TILES = 1024  # of a product of few tokens


class Fused:
    """`Operations`. A layer of few tokens, whose time is that of reading the weights, is five or six kernels of our
    own; one of many tokens is eight or nine, of which three or four are products of cuBLAS. Used by one thread, on one
    stream."""

    def __init__(self, device: torch.device) -> None:
        self._arrived = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)

    def begin(self, requests: Requests, batch: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor, Residual]:
        cast = _few_tma(len(batch), embedding.dtype) is not None
        slots, positions, x, copied = kernels.begin(
            batch, requests.ended, requests.numbers, requests.steps, embedding, cast=cast
        )
        return slots, positions, Residual(x, copied=copied)

    def project_heads(
        self, x: Residual, weight: Tensor, bias: Tensor, eps: float, places: Places, layer: int
    ) -> Tensor:
        keys, values = places.keys[layer], places.values[layer]
        where = keys, values, places.tables, places.slots, places.positions, places.rotary
        if x.copied and (few := _few_tma(len(x.x), weight.dtype)):
            return kernels.project_heads_tma(*x.copied, weight, bias, eps, *where, few[0])
        if tile := tiles(weight.dtype).decoder_heads.of(len(x.x)):
            return kernels.project_heads(x.x, weight, bias, eps, *where, tile)
        return kernels.apply_rope(F.linear(_normed(x, eps, weight.dtype), weight, bias), *where)

    def attend(self, q: Tensor, places: Places, layer: int) -> Tensor:
        keys, values = places.keys[layer], places.values[layer]
        return kernels.attend_pages(q, keys, values, places.tables, places.slots, places.positions, places.consecutive)

    def project_add(self, y: Tensor, weight: Tensor, x: Residual, eps: float) -> None:
        x.normed = x.copied = None
        if tile := tiles(weight.dtype).decoder_added.of(len(y)):
            cast = _few_tma(len(y), weight.dtype) is not None
            x.copied = kernels.linear_residual(y, weight, x.x, self._arrived, tile, cast=cast)
        else:
            x.normed = kernels.rms_norm(x.x, eps, weight.dtype, F.linear(y, weight))

    def gated(self, x: Residual, weight: Tensor, eps: float) -> Tensor:
        if x.copied and (few := _few_tma(len(x.x), weight.dtype)):
            return kernels.gated_tma(*x.copied, weight, eps, few[1])
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

    def draw(self, logits: Tensor, requests: Requests, slots: Tensor) -> None:
        of, sampler = requests, requests.sampler
        kernels.sample(
            logits, sampler.bias, sampler.seen, sampler.recent, of.numbers, of.sampling, of.ends, of.ended, slots,
            of.steps, of.ring, of.first, NOTHING, FAULT,
        )  # fmt: skip


def _normed(x: Residual, eps: float, dtype: torch.dtype) -> Tensor:
    return kernels.rms_norm(x.x, eps, dtype) if x.normed is None else x.normed


def _few_tma(T: int, dtype: torch.dtype) -> tuple[ProductTile, ProductTile] | None:
    """The tiles of heads and gates that TMA fetches, or None if others are faster or the GPU has no TMA."""
    fetched = decoder_tma(dtype)
    return fetched.few(T) if fetched else None
