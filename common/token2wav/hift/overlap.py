"""Joining chunks of audio: the tail of one fades into the head of the next.

`FadeWindow` and `cross_fade` join two chunks; `OverlapPool` keeps what streams carry from one chunk to the next, and
`OverlapRenderer` runs HiFT on a batch of chunks and joins each to its stream.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.constants import OVERLAP_SAMPLES
from common.errors import UnavailableError
from common.hift.generator import HiFTGenerator
from common.token2wav.noise import NoiseTape


@dataclass(frozen=True)
class FadeWindow:
    """Two halves of a window, float64 (N,): `rising` weighs the new chunk, `falling` the one before."""

    rising: Tensor
    falling: Tensor


def raw_hamming_window(samples: int = OVERLAP_SAMPLES) -> FadeWindow:
    """Halves of a symmetric Hamming window of 2 * samples, which sum to 1.08: upstream's, for comparison with it."""
    window = torch.from_numpy(np.hamming(2 * samples))
    return FadeWindow(rising=window[:samples], falling=window[samples:])


def hamming_window(samples: int = OVERLAP_SAMPLES) -> FadeWindow:
    """The same halves scaled to sum to one, so that what both chunks agree on passes without a swell."""
    raw = raw_hamming_window(samples)
    total = raw.rising + raw.falling
    return FadeWindow(rising=raw.rising / total, falling=raw.falling / total)


def cross_fade(previous_tail: Tensor, head: Tensor, window: FadeWindow) -> Tensor:
    """The new chunk with its first samples faded in over the tail of the one before.

    previous_tail (..., >= N): its last N samples count, N the length of a half window. head (..., >= N).
    Returns a new tensor of head's shape. ValueError if either is shorter than the window.
    """
    N = window.rising.shape[0]
    if previous_tail.shape[-1] < N or head.shape[-1] < N:
        raise ValueError(f"cannot fade {previous_tail.shape[-1]} into {head.shape[-1]} samples over a window of {N}")
    # Products in float64, as upstream's: its results then come out to the last bit.
    rising, falling = window.rising.to(head.device), window.falling.to(head.device)
    faded = head[..., :N].double() * rising + previous_tail[..., -N:].double() * falling
    return torch.cat([faded.to(head.dtype), head[..., N:]], dim=-1)


class OverlapPool:
    """What streams carry from chunk to chunk: 33 kB per stream at the official sizes, allocated once.

    The last slot is scratch: padding rows of a batch write to it.
    """

    def __init__(self, slots: int, mel_bins: int, frames: int, samples: int, device: torch.device):
        self.mel = torch.zeros(slots + 1, mel_bins, frames, device=device)  # frames that the next chunk repeats
        self.source = torch.zeros(slots + 1, samples, device=device)  # their harmonic source
        self.speech = torch.zeros(slots + 1, samples, device=device)  # their audio, withheld
        self._free = list(range(slots))

    @property
    def nbytes(self) -> int:
        return self.mel.nbytes + self.source.nbytes + self.speech.nbytes

    def acquire(self) -> int:
        if not self._free:
            raise UnavailableError(f"all {len(self.mel) - 1} streams of the vocoder are taken")
        return self._free.pop()

    def release(self, slot: int) -> None:
        self._free.append(slot)


class OverlapRenderer:
    """One HiFT pass for a batch of chunks, which reads their overlaps from the pool and replaces them.

    mel (B, 80, T): new frames, padded after each row's `frames` (B,). slots (B,): of the pool. starts (B,): absolute
    index of the first frame that is rendered, repeated ones included.
    """

    def __init__(self, hift: HiFTGenerator, pool: OverlapPool, noise: NoiseTape, window: FadeWindow):
        device = hift.conv_pre.weight.device
        self.hift = hift
        self.pool = pool
        self._noise = noise
        self._window = FadeWindow(window.rising.to(device), window.falling.to(device))

    def first(self, mel: Tensor, slots: Tensor, starts: Tensor, frames: Tensor) -> Tensor:
        """Speech (B, T * hop) of chunks that begin their streams."""
        cached = mel.new_zeros(len(mel), 1, 0)
        speech, source = self.hift(mel, self._noise_of(mel, starts), cached, frames)
        self._keep(slots, mel, speech, source, frames)
        return speech

    def later(self, mel: Tensor, slots: Tensor, starts: Tensor, frames: Tensor) -> Tensor:
        """Speech (B, (overlap + T) * hop) of chunks that continue their streams, faded in."""
        pool = self.pool
        mel, frames = torch.cat([pool.mel[slots], mel], dim=2), frames + pool.mel.shape[2]
        speech, source = self.hift(mel, self._noise_of(mel, starts), pool.source[slots][:, None], frames)
        speech = cross_fade(pool.speech[slots], speech, self._window)
        self._keep(slots, mel, speech, source, frames)
        return speech

    def _noise_of(self, mel: Tensor, starts: Tensor) -> Tensor:
        hop = self.hift.config.hop
        return self._noise.gather(starts * hop, mel.shape[2] * hop)

    def _keep(self, slots: Tensor, mel: Tensor, speech: Tensor, source: Tensor, frames: Tensor) -> None:
        pool, hop = self.pool, self.hift.config.hop
        at = _tail_indices(frames, pool.mel.shape[2])
        pool.mel.index_copy_(0, slots, mel.gather(2, at[:, None].expand(-1, mel.shape[1], -1)))
        at = _tail_indices(frames * hop, pool.speech.shape[1])
        pool.source.index_copy_(0, slots, source[:, 0].gather(1, at))
        pool.speech.index_copy_(0, slots, speech.gather(1, at))


def _tail_indices(ends: Tensor, count: int) -> Tensor:
    """Indices (B, count) of the last `count` positions of each row, clamped in shorter rows, which end their stream."""
    return (ends[:, None] - count + torch.arange(count, device=ends.device)).clamp(min=0)
