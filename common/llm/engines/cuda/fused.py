"""The parts of the network by fused kernels, on a GPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from common import kernels
from common.llm.batch_sampler import BatchSampler
from common.llm.engines.cuda.operations import Places

FEW_TOKENS = 16  # up to here the weights are what takes time to read, and our own products are faster
MOST_TILES = 1024  # of a product of few tokens


class Fused:
    """`Operations`. A layer of few tokens is five or six kernels; one of many tokens is eleven or twelve, of which four
    are products of cuBLAS. Used by one thread, on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._arrived = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)

    def project_heads(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, places: Places, layer: int) -> Tensor:
        keys, values = places.keys[layer], places.values[layer]
        where = keys, values, places.tables, places.slots, places.positions, places.rotary
        if len(x) <= FEW_TOKENS:
            return kernels.project_heads(x, weight, bias, eps, *where)
        return kernels.turn_heads(F.linear(kernels.normed(x, eps, weight.dtype), weight, bias), *where)

    def attend(self, q: Tensor, places: Places, layer: int) -> Tensor:
        keys, values = places.keys[layer], places.values[layer]
        return kernels.attend_pages(q, keys, values, places.tables, places.slots, places.positions, places.consecutive)

    def project_add(self, y: Tensor, weight: Tensor, x: Tensor) -> None:
        if len(x) <= FEW_TOKENS:
            kernels.project_add(y, weight, x, self._arrived)
        else:
            kernels.add(x, F.linear(y, weight))

    def gated(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if len(x) <= FEW_TOKENS:
            return kernels.gated(x, weight, eps)
        return kernels.gate(F.linear(kernels.normed(x, eps, weight.dtype), weight))

    def head(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return kernels.project_normed(x, weight, eps)

    def draw(
        self,
        logits: Tensor,
        sampler: BatchSampler,
        slots: Tensor,
        drawn: Tensor,
        seeds: Tensor,
        sampling: Tensor,
        ends: Tensor,
    ) -> Tensor:
        return kernels.draw(logits, sampler.bias, sampler.seen, sampler.recent, ends, slots, drawn, seeds, sampling)
