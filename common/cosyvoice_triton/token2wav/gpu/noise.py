"""Fixed noise that streams read by absolute position, so that it depends neither on the batch nor on a restart."""

import torch
from torch import Tensor

from cosyvoice_triton.constants import MAX_STREAM_TOKENS, MEL_BINS, SAMPLE_RATE, SPEAKER_DIM, SPEECH_VOCAB, TOKEN_RATE
from cosyvoice_triton.networks.hift import HiFTConfig

FLOW_NOISE_FRAMES = 15_000  # upstream's `rand_noise`: 300 s
SOURCE_NOISE_SECONDS = 10


class NoiseTape:
    """Rows of fixed noise, repeated endlessly: row `i` of a stream is always row `i % len(tape)`."""

    def __init__(self, rows: Tensor):
        """Repeat `rows` without end. rows: (L, C), L >= 1, on the device that reads them."""
        self._rows = rows

    def read(self, start: int, length: int) -> Tensor:
        """Return rows `start` to `start + length` of the endless tape: (length, C)."""
        period = len(self._rows)
        first = start % period
        if first + length <= period:
            return self._rows[first : first + length]
        index = torch.arange(start, start + length, device=self._rows.device) % period
        return self._rows[index]

    def gather(self, starts: Tensor, length: int) -> Tensor:
        """Return the same for several streams, each from its own start (B,): (B, length, C)."""
        return self.at(starts[:, None] + torch.arange(length, device=starts.device))

    def at(self, index: Tensor) -> Tensor:
        """Return single rows of the endless tape: (...) -> (..., C)."""
        return self._rows[index % len(self._rows)]


def flow_noise(device: torch.device | str = "cpu") -> NoiseTape:
    """Return the initial state of the flow's ODE by mel frame, (15000, 80).

    The values of upstream's CosyVoice2 `rand_noise` buffer: (1, 80, 15000) drawn on the CPU after seeding with 0.
    """
    noise = torch.randn(1, MEL_BINS, FLOW_NOISE_FRAMES, generator=torch.Generator().manual_seed(0))
    return NoiseTape(noise[0].T.contiguous().to(device))  # (1, C, T) -> (T, C)


def source_noise(components: int, device: torch.device | str = "cpu") -> NoiseTape:
    """Make the additive noise of the vocoder's harmonic source by audio sample, (240000, components), period 10 s."""
    samples = SOURCE_NOISE_SECONDS * SAMPLE_RATE
    return NoiseTape(torch.randn(samples, components, generator=torch.Generator().manual_seed(1)).to(device))


def uniform_noise(components: int, device: torch.device | str = "cpu") -> NoiseTape:
    """Make the additive noise of CosyVoice3's harmonic source, uniform in 0..1, for the samples of the longest stream.

    The values of upstream's table, which is in no checkpoint; see `table_generator`.
    """
    generator = table_generator()
    torch.rand(components, generator=generator)  # initial phases, which change nothing
    samples = MAX_STREAM_TOKENS // TOKEN_RATE * SAMPLE_RATE
    return NoiseTape(torch.rand(samples, components, generator=generator).to(device))


def table_generator() -> torch.Generator:
    """Return the state in which upstream's CosyVoice3 draws the vocoder's tables: seeded for the flow's noise, after
    which the initial weights of some layers are drawn, at the official sizes."""
    generator, width = torch.Generator().manual_seed(0), HiFTConfig.f0_channels
    torch.randn(1, MEL_BINS, FLOW_NOISE_FRAMES, generator=generator)
    torch.randn(SPEECH_VOCAB, MEL_BINS, generator=generator)  # token embedding
    drawn = (SPEAKER_DIM + 1) * MEL_BINS  # speaker projection
    drawn += (4 * MEL_BINS + 1) * width + 4 * (3 * width + 1) * width + width + 1  # f0 predictor
    torch.rand(drawn, generator=generator)
    return generator
