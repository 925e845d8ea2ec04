"""Difference between streamed audio and the same utterance rendered as a whole, as figures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from cosyvoice_triton.constants import HOP_SAMPLES, OVERLAP_SAMPLES
from cosyvoice_triton.voice.audio import mel_spectrogram

DECIBELS = 20 / math.log(10)  # per unit of natural log magnitude


@dataclass(frozen=True)
class Difference:
    """mel_db: mean distance of the log mels. joint_db: the same within the cross-fades of chunks, None without any;
    an audible joint makes it larger than mel_db. snr_db: energy of the offline audio over that of the difference, None
    if they are equal.
    """

    id: str
    mel_db: float
    joint_db: float | None
    snr_db: float | None


def compare(name: str, offline: np.ndarray, waveforms: Sequence[np.ndarray]) -> Difference:
    """offline: (N,); waveforms: the chunks of the streamed audio. ValueError if they do not have N samples together."""
    streamed = np.concatenate(waveforms)
    if len(streamed) != len(offline):
        raise ValueError(f"streamed audio has {len(streamed)} samples, the offline audio {len(offline)}")
    distance = np.abs(_mel(streamed) - _mel(offline)).mean(axis=0) * DECIBELS  # (T,)
    frames = np.arange(len(distance)) * HOP_SAMPLES
    faded = np.zeros(len(distance), bool)
    for joint in joints(waveforms):  # the withheld end of a chunk is cross-faded into the next one
        faded |= (frames >= joint) & (frames < joint + OVERLAP_SAMPLES)
    noise = float(np.square(streamed - offline).sum())
    energy = float(np.square(offline).sum())
    return Difference(
        id=name,
        mel_db=float(distance.mean()),
        joint_db=float(distance[faded].mean()) if faded.any() else None,
        snr_db=10 * math.log10(energy / noise) if energy and noise else None,
    )


def joints(waveforms: Sequence[np.ndarray]) -> list[int]:
    """Sample positions at which a chunk begins, without the first."""
    return list(accumulate(len(waveform) for waveform in waveforms))[:-1]


def _mel(audio: np.ndarray) -> np.ndarray:
    """(N,) -> log mel (80, N // hop)"""
    return mel_spectrogram(torch.from_numpy(audio)[None])[0].numpy()
