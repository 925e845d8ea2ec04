"""Vocoders on a GPU: CUDA graphs by batch size and chunk length.

In eager mode the convolution library plans every new shape for tens of milliseconds.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from cosyvoice_triton.token2wav.gpu.graphs import Graphs
from cosyvoice_triton.token2wav.gpu.limits import HIFT_FRAMES, BatchLimits, Size


class VocoderRenderer(Protocol):
    """One pass of a vocoder over a batch of chunks, which reads what is kept of their streams and replaces it."""

    scratch: int  # the slot that padding rows write to

    def render(self, begun: bool, mel: Tensor, slots: Tensor, *others: Tensor) -> Tensor:
        """Render the speech (B, N) of chunks that all continue their streams (`begun`) or all begin them: mel (B, 80,
        T), slots (B,), and what else the vocoder needs of each row."""
        ...

    def inputs(self, B: int, T: int) -> tuple[Tensor, ...]:
        """Make those tensors for a batch of that size, of padding rows."""
        ...


class GraphedRenderer:
    """A renderer by CUDA graphs; batches that no graph holds are split."""

    def __init__(
        self,
        plain: VocoderRenderer,
        limits: BatchLimits,
        *,
        most: int = HIFT_FRAMES,
        make: Callable[..., Graphs] = Graphs,
    ):
        """Make the graphs of a renderer. most: frames of a batch, padding included. make: makes the graphs."""
        self._plain = plain
        # A later segment of a text begins with a hop of any length.
        names = {False: "the vocoder's first chunks", **({} if limits.starts else {True: "the vocoder"})}
        self._graphs = {
            begun: make(
                partial(plain.render, begun),
                plain.inputs,
                limits.sizes(limits.chunk_frames, most),
                name,
                worker=limits.worker,
            )
            for begun, name in names.items()
        }

    def render(self, begun: bool, mel: Tensor, slots: Tensor, *others: Tensor) -> Tensor:
        graphs = self._graphs[begun]

        def compute(part: slice, size: Size | None) -> Tensor:
            inputs = [x[part] for x in (mel, slots, *others)]
            if size is None:
                return self._plain.render(begun, *inputs)
            B = len(inputs[0])
            graphs.inputs(size)[1][B:] = self._plain.scratch
            return graphs.run(size, *inputs)[:B]

        return graphs.run_rows(len(mel), mel.shape[2], compute)
