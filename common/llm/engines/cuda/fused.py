"""The parts of the network by fused kernels, on a GPU."""

from torch import Tensor

from common import kernels
from common.llm.batch_sampler import BatchSampler
from common.llm.engines.cuda.operations import Places


class Fused:
    """`Operations`: five kernels per layer, six for few tokens, and one for the draw."""

    def project_heads(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, places: Places, layer: int) -> Tensor:
        keys, values = places.keys[layer], places.values[layer]
        return kernels.project_heads(
            x, weight, bias, eps, keys, values, places.tables, places.slots, places.positions, places.rotary
        )

    def attend(self, q: Tensor, places: Places, layer: int) -> Tensor:
        keys, values = places.keys[layer], places.values[layer]
        return kernels.attend_pages(q, keys, values, places.tables, places.slots, places.positions)

    def project_add(self, y: Tensor, weight: Tensor, x: Tensor) -> None:
        kernels.project_add(y, weight, x)

    def gated(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return kernels.gated(x, weight, eps)

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
