"""Joining chunks of audio: the tail of one fades into the head of the next."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.constants import OVERLAP_SAMPLES


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
