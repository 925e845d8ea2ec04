"""Vocoders on a GPU: CUDA graphs by batch size and chunk length.

In eager mode the convolution library plans every new shape for tens of milliseconds.
"""

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from cosyvoice_triton.token2wav.gpu.graphs import Graphs
from cosyvoice_triton.token2wav.gpu.limits import HIFT_FRAMES, BatchLimits


class Renderer(Protocol):
    """One pass of a vocoder over a batch of chunks, which reads what is kept of their streams and replaces it."""

    scratch: int  # the slot that padding rows write to

    def render(self, begun: bool, mel: Tensor, slots: Tensor, *others: Tensor) -> Tensor:
        """The speech (B, N) of chunks that all continue their streams (`begun`) or all begin them: mel (B, 80, T),
        slots (B,), and what else the vocoder needs of each row."""
        ...

    def inputs(self, B: int, T: int) -> tuple[Tensor, ...]:
        """Those tensors for a batch of that size, of padding rows."""
        ...


class GraphedRenderer:
    """A renderer by CUDA graphs; batches that no graph holds are split."""

    def __init__(self, plain: Renderer, limits: BatchLimits):
        self._plain = plain
        of = {False: (limits.first_chunk_frames, "'s first chunks")}
        if not limits.starts:
            of[True] = limits.chunk_frames, ""
        self._graphs = {
            begun: Graphs(
                partial(plain.render, begun),
                plain.inputs,
                limits.sizes(lengths, HIFT_FRAMES),
                f"the vocoder{name}",
                worker=limits.worker,
            )
            for begun, (lengths, name) in of.items()
        }

    def render(self, begun: bool, mel: Tensor, slots: Tensor, *others: Tensor) -> Tensor:
        graphs, inputs, B = self._graphs[begun], (mel, slots, *others), len(mel)
        size = graphs.fitting(B, mel.shape[2])
        if size is None and B > 1:
            first, second = zip(*(x.tensor_split(2) for x in inputs), strict=True)
            # The first half is copied: the second one's graph overwrites it.
            halves = self.render(begun, *first).clone(), self.render(begun, *second)
            width = min(half.shape[1] for half in halves)  # beyond the longest row there is padding only
            return torch.cat([half[:, :width] for half in halves])
        if size is None:
            return self._plain.render(begun, *inputs)
        graphs.inputs(size)[1][B:] = self._plain.scratch
        return graphs.run(size, *inputs)[:B]
