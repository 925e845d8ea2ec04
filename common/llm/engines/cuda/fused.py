"""The parts of the network by fused kernels, on a GPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from common import kernels
from common.kernels.tiles import tiles
from common.llm.engines.cuda.operations import FAULT, NOTHING, Places, Requests, Residual

MOST_TILES = 1024  # of a product of few tokens


class Fused:
    """`Operations`. A layer of few tokens, whose time is that of reading the weights, is five or six kernels of our
    own; one of many tokens is nine, of which four are products of cuBLAS. Used by one thread, on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._arrived = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)

    def begin(self, requests: Requests, batch: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor, Residual]:
        slots, positions, x = kernels.begin(batch, requests.ended, requests.numbers, requests.steps, embedding)
        return slots, positions, Residual(x)

    def project_heads(
        self, x: Residual, weight: Tensor, bias: Tensor, eps: float, places: Places, layer: int
    ) -> Tensor:
        keys, values = places.keys[layer], places.values[layer]
        where = keys, values, places.tables, places.slots, places.positions, places.rotary
        if tile := tiles(weight.dtype).decoder_heads.of(len(x.x)):
            return kernels.project_heads(x.x, weight, bias, eps, *where, tile)
        return kernels.turn_heads(F.linear(_normed(x, eps, weight.dtype), weight, bias), *where)

    def attend(self, q: Tensor, places: Places, layer: int) -> Tensor:
        keys, values = places.keys[layer], places.values[layer]
        return kernels.attend_pages(q, keys, values, places.tables, places.slots, places.positions, places.consecutive)

    def project_add(self, y: Tensor, weight: Tensor, x: Residual, eps: float) -> None:
        if tile := tiles(weight.dtype).decoder_added.of(len(y)):
            kernels.project_add(y, weight, x.x, self._arrived, tile)
            x.normed = None
        else:
            x.normed = kernels.normed(x.x, eps, weight.dtype, F.linear(y, weight))

    def gated(self, x: Residual, weight: Tensor, eps: float) -> Tensor:
        if tile := tiles(weight.dtype).decoder_gated.of(len(x.x)):
            return kernels.gated(x.x, weight, eps, tile)
        return kernels.gate(F.linear(_normed(x, eps, weight.dtype), weight))

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
