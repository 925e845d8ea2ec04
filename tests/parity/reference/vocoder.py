"""HiFT chunk by chunk as upstream runs it: sources that begin anew, with the end of the one before put in front."""

import numpy as np
import torch
from cosyvoice_triton.constants import OVERLAP_FRAMES
from cosyvoice_triton.networks.hift.generator import HiFTGenerator
from cosyvoice_triton.token2wav.gpu.noise import NoiseTape
from torch import Tensor


def hamming_window(samples: int) -> Tensor:
    """Upstream's window of two halves, float64 (2 * samples,): they sum to 1.08 and begin and end at 0.08."""
    return torch.from_numpy(np.hamming(2 * samples))


def cross_fade(previous_tail: Tensor, head: Tensor, window: Tensor) -> Tensor:
    """The new chunk (..., >= N) with its first N samples faded in over the last N of `previous_tail` (..., >= N).

    window (2N,): its rising half weighs the new chunk. Computed in float64, as upstream's.
    """
    rising, falling = window.chunk(2)
    N = len(rising)
    faded = head[..., :N].double() * rising + previous_tail[..., -N:].double() * falling
    return torch.cat([faded.to(head.dtype), head[..., N:]], dim=-1)


class ReferenceVocoder:
    """One stream. It keeps what upstream's caches do: mel (80, t), source (N,), speech (N,), empty before a chunk.

    noise: every chunk reads it anew.
    """

    def __init__(self, hift: HiFTGenerator, window: Tensor, noise: NoiseTape) -> None:
        self._hift, self._window, self._noise = hift, window, noise
        self.mel = torch.zeros(hift.config.mel_bins, 0)
        self.source, self.speech = torch.zeros(0), torch.zeros(0)

    @torch.inference_mode()
    def step(self, mel: Tensor, final: bool) -> Tensor:
        """The audio (N,) of the next mel frames (80, T)."""
        mel = torch.cat([self.mel, mel], dim=1)
        samples = mel.shape[1] * self._hift.config.hop
        source, _ = self._hift.m_source(self._hift.f0_predictor(mel[None]), self._noise.read(0, samples)[None])
        source[0, 0, : len(self.source)] = self.source
        speech = self._hift.decode(mel[None], source)[0]
        if len(self.speech):
            speech = cross_fade(self.speech, speech, self._window)
        if final:
            return speech
        withheld = OVERLAP_FRAMES * self._hift.config.hop
        self.mel, self.source, self.speech = mel[:, -OVERLAP_FRAMES:], source[0, 0, -withheld:], speech[-withheld:]
        return speech[:-withheld]
