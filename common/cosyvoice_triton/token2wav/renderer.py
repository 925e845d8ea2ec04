"""What one worker of the engine renders with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cosyvoice_triton.token2wav.flow.base import StreamingFlow, Vocoder


@dataclass(frozen=True)
class Renderer:
    """What one worker renders with: a flow and a vocoder with their CUDA graphs, and a CUDA stream."""

    flow: StreamingFlow
    vocoder: Vocoder
    stream: torch.cuda.Stream | None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the body compute on the CUDA stream. What it has begun there is done at the end, also after an error, so
        that threads and workers need no other order between them."""
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            try:
                yield
            finally:
                if self.stream is not None:
                    self.stream.synchronize()
