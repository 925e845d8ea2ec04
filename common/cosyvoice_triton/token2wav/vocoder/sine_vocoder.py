"""The smallest vocoder, a template for others: a sine for each band of the mel, as loud as the band is.

It speaks like a robot, reads no file (`hift=""` of its stack) and keeps nothing of a stream but its position, so that
chunks are exactly the audio of the whole.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from cosyvoice_triton.constants import HOP_SAMPLES, MEL_BINS, MEL_RATE, SAMPLE_RATE
from cosyvoice_triton.token2wav.flow.base import VocoderOptions
from cosyvoice_triton.token2wav.vocoder.base import BatchVocoder, StreamSlots

_HIGHEST = 15 + 27 * math.log(8) / math.log(6.4)  # 8 kHz, the end of the mel, on Slaney's scale


def load(path: Path, options: VocoderOptions) -> "SineVocoder":
    """Return the vocoder. A trained one would load its network from `path`."""
    scale = torch.linspace(0, _HIGHEST, MEL_BINS + 2, dtype=torch.float64)
    hertz = torch.where(scale < 15, scale * 200 / 3, 1000 * ((scale - 15) * math.log(6.4) / 27).exp())
    seconds = torch.arange(SAMPLE_RATE) / SAMPLE_RATE
    sines = torch.sin(2 * math.pi * hertz[1:-1].round()[:, None] * seconds)  # of whole hertz: a second repeats
    # The largest magnitude of a sine of the features' Hann window is a quarter of its 4 hops; it leaks into 2 more bins
    # with half of that. A filter weighs its centre with 2 / width.
    loudness = (hertz[2:] - hertz[:-2]) / (4 * HOP_SAMPLES)
    return SineVocoder((sines * loudness[:, None]).float().to(options.device), options)


class SineVocoder(BatchVocoder):
    """sines (80, SAMPLE_RATE): a second of each band, as loud as a mel of 0."""

    nbytes = 0  # memory that it keeps for streams

    def __init__(self, sines: Tensor, options: VocoderOptions):
        super().__init__(StreamSlots(options.limits.max_streams), options.limits, sines.device, needs=1)
        self._sines = sines.unflatten(1, (MEL_RATE, HOP_SAMPLES)).transpose(0, 1)  # (frames of a second, 80, hop)

    def for_worker(self, worker: int) -> None:
        """Return None: one worker renders all."""

    def exact(self) -> "SineVocoder":
        return self  # it is in float32

    def _pass(
        self, begun: bool, mel: Tensor, slots: Tensor, starts: Tensor, frames: Tensor, ends: Sequence[bool]
    ) -> Tensor:
        B, T = mel.shape[0], mel.shape[2]
        places = (starts[:, None] + torch.arange(T, device=mel.device)) % MEL_RATE
        hops = [torch.einsum("bk,bkn->bn", mel[:, :, t].exp(), self._sines[places[:, t]]) for t in range(T)]
        return torch.cat([mel.new_zeros(B, 0), *hops], dim=1)

    def _sent(self, frames: int, *, begun: bool, final: bool) -> tuple[int, int]:
        return frames, frames * HOP_SAMPLES  # nothing is withheld

    def _whole(self, mel: Tensor, frames: Tensor) -> Tensor:
        return self._pass(False, mel, frames, torch.zeros_like(frames), frames, ())
