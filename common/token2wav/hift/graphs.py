"""HiFT on a GPU: CUDA graphs by batch size and chunk length.

In eager mode the convolution library plans every new shape for tens of milliseconds.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from common.constants import OVERLAP_FRAMES
from common.hift.generator import HiFTGenerator
from common.token2wav.graphs import Graphs
from common.token2wav.hift.overlap import OverlapPool, OverlapRenderer
from common.token2wav.limits import HIFT_FRAMES, BatchLimits
from common.token2wav.noise import NoiseTape


class GraphedRenderer(OverlapRenderer):
    """`OverlapRenderer` by CUDA graphs; batches that no graph holds are split."""

    def __init__(self, hift: HiFTGenerator, pool: OverlapPool, noise: NoiseTape, limits: BatchLimits):
        super().__init__(hift, pool, noise)
        sizes = limits.sizes(limits.chunk_frames, HIFT_FRAMES)
        first = limits.sizes(limits.first_chunk_frames, HIFT_FRAMES)
        self._later = Graphs(super().later, self._inputs, sizes, "the vocoder")
        self._first = Graphs(super().first, self._inputs, first, "the vocoder's first chunks")

    def first(self, mel: Tensor, slots: Tensor, starts: Tensor, frames: Tensor) -> Tensor:
        return self._run(self._first, super().first, mel, slots, starts, frames)

    def later(self, mel: Tensor, slots: Tensor, starts: Tensor, frames: Tensor) -> Tensor:
        return self._run(self._later, super().later, mel, slots, starts, frames)

    def _run(self, graphs: Graphs, plain: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        mel = inputs[0]
        size = graphs.fitting(len(mel), mel.shape[2])
        if size is None and len(mel) > 1:
            first, second = zip(*(x.tensor_split(2) for x in inputs), strict=True)
            samples = (mel.shape[2] + OVERLAP_FRAMES) * self.hift.config.hop
            # The first half is copied: the second one's graph overwrites it.
            speech = self._run(graphs, plain, *first)[:, :samples].clone()
            return torch.cat([speech, self._run(graphs, plain, *second)[:, :samples]])
        if size is None:
            return plain(*inputs)
        graphs.inputs(size)[1][len(mel) :] = self.pool.scratch  # padding rows write to the scratch slot
        return graphs.run(size, *inputs)[: len(mel)]

    def _inputs(self, B: int, T: int) -> tuple[Tensor, ...]:
        device = self.pool.mel.device
        scratch = torch.full((B,), self.pool.scratch, device=device)
        mel = torch.zeros(B, self.hift.config.mel_bins, T, device=device)
        return mel, scratch, torch.zeros_like(scratch), torch.full_like(scratch, T)
