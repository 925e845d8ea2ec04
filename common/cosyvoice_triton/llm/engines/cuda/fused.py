"""The parts of the network by fused kernels, on a GPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cosyvoice_triton import kernels
from cosyvoice_triton.kernels.tiles import ProductTile, decoder_copied, tiles
from cosyvoice_triton.llm.engines.cuda.operations import FAULT, NOTHING, Places, Requests, Residual

MOST_TILES = 1024  # of a product of few tokens


class Fused:
    """`Operations`. A layer of few tokens, whose time is that of reading the weights, is five or six kernels of our
    own; one of many tokens is eight or nine, of which three or four are products of cuBLAS. Used by one thread, on one
    stream."""

    def __init__(self, device: torch.device) -> None:
        self._arrived = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)

    def begin(self, requests: Requests, batch: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor, Residual]:
        copies = _few_copied(len(batch), embedding.dtype) is not None
        slots, positions, x, copied = kernels.begin(
            batch, requests.ended, requests.numbers, requests.steps, embedding, copies=copies
        )
        return slots, positions, Residual(x, copied=copied)

    def project_heads(
        self, x: Residual, weight: Tensor, bias: Tensor, eps: float, places: Places, layer: int
    ) -> Tensor:
        keys, values = places.keys[layer], places.values[layer]
        where = keys, values, places.tables, places.slots, places.positions, places.rotary
        if x.copied and (few := _few_copied(len(x.x), weight.dtype)):
            return kernels.project_heads_copied(*x.copied, weight, bias, eps, *where, few[0])
        if tile := tiles(weight.dtype).decoder_heads.of(len(x.x)):
            return kernels.project_heads(x.x, weight, bias, eps, *where, tile)
        return kernels.turn_heads(F.linear(_normed(x, eps, weight.dtype), weight, bias), *where)

    def attend(self, q: Tensor, places: Places, layer: int) -> Tensor:
        keys, values = places.keys[layer], places.values[layer]
        return kernels.attend_pages(q, keys, values, places.tables, places.slots, places.positions, places.consecutive)

    def project_add(self, y: Tensor, weight: Tensor, x: Residual, eps: float) -> None:
        x.normed = x.copied = None
        if tile := tiles(weight.dtype).decoder_added.of(len(y)):
            copies = _few_copied(len(y), weight.dtype) is not None
            x.copied = kernels.project_add(y, weight, x.x, self._arrived, tile, copies=copies)
        else:
            x.normed = kernels.normed(x.x, eps, weight.dtype, F.linear(y, weight))

    def gated(self, x: Residual, weight: Tensor, eps: float) -> Tensor:
        if x.copied and (few := _few_copied(len(x.x), weight.dtype)):
            return kernels.gated_copied(*x.copied, weight, eps, few[1])
        if tile := tiles(weight.dtype).decoder_gated.of(len(x.x)):
            return kernels.gated(x.x, weight, eps, tile)
        normed = _normed(x, eps, weight.dtype)
        if copied := decoder_copied(weight.dtype):
            return kernels.gated_copied(normed, None, weight, eps, copied.many(len(x.x)))
        return kernels.gate(F.linear(normed, weight))

    def head(self, x: Residual, weight: Tensor, eps: float) -> Tensor:
        tile = tiles(weight.dtype).decoder_logits.of(len(x.x))
        assert tile is not None  # for any number of tokens
        return kernels.project_normed(x.x, weight, eps, tile)

    def draw(self, logits: Tensor, requests: Requests, slots: Tensor) -> None:
        of, sampler = requests, requests.sampler
        kernels.draw(
            logits, sampler.bias, sampler.seen, sampler.recent, of.numbers, of.sampling, of.ends, of.ended, slots,
            of.steps, of.ring, of.first, NOTHING, FAULT,
        )  # fmt: skip


def _normed(x: Residual, eps: float, dtype: torch.dtype) -> Tensor:
    return kernels.normed(x.x, eps, dtype) if x.normed is None else x.normed


def _few_copied(T: int, dtype: torch.dtype) -> tuple[ProductTile, ProductTile] | None:
    """Tiles of heads and gates that the copy engine fetches; None: others are faster, or there is none."""
    copied = decoder_copied(dtype)
    return copied.few(T) if copied else None
