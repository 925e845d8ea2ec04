"""Fixed noise that streams read by absolute position: audio depends neither on the batch nor on a restart."""

import torch
from torch import Tensor

from common.constants import MEL_BINS, SAMPLE_RATE

FLOW_NOISE_FRAMES = 15_000  # upstream's `rand_noise`: 300 s
SOURCE_NOISE_SECONDS = 10


class NoiseTape:
    """Rows of fixed noise, repeated endlessly: row `i` of a stream is always row `i % len(tape)`."""

    def __init__(self, rows: Tensor):
        """rows: (L, C), L >= 1, on the device that reads them."""
        self._rows = rows

    def read(self, start: int, length: int) -> Tensor:
        """(length, C): rows `start` to `start + length` of the endless tape."""
        period = len(self._rows)
        first = start % period
        if first + length <= period:
            return self._rows[first : first + length]
        index = torch.arange(start, start + length, device=self._rows.device) % period
        return self._rows[index]

    def gather(self, starts: Tensor, length: int) -> Tensor:
        """(B, length, C): the same for several streams, each from its own start (B,)."""
        return self.at(starts[:, None] + torch.arange(length, device=starts.device))

    def at(self, index: Tensor) -> Tensor:
        """Single rows of the endless tape: (...) -> (..., C)."""
        return self._rows[index % len(self._rows)]


def flow_noise(device: torch.device | str = "cpu") -> NoiseTape:
    """The initial state of the flow's ODE by mel frame, (15000, 80).

    The values of upstream's CosyVoice2 `rand_noise` buffer: (1, 80, 15000) drawn on the CPU after seeding with 0.
    """
    noise = torch.randn(1, MEL_BINS, FLOW_NOISE_FRAMES, generator=torch.Generator().manual_seed(0))
    return NoiseTape(noise[0].T.contiguous().to(device))  # (1, C, T) -> (T, C)


def source_noise(components: int, device: torch.device | str = "cpu") -> NoiseTape:
    """Additive noise of the vocoder's harmonic source by audio sample, (240000, components), period 10 s."""
    samples = SOURCE_NOISE_SECONDS * SAMPLE_RATE
    return NoiseTape(torch.randn(samples, components, generator=torch.Generator().manual_seed(1)).to(device))
