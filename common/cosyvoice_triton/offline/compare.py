"""Difference between streamed audio and the same utterance rendered as a whole, as figures and as a plot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from cosyvoice_triton.constants import HOP_SAMPLES, MEL_RATE, OVERLAP_SAMPLES, SAMPLE_RATE
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


def plot(difference: Difference, offline: np.ndarray, waveforms: Sequence[np.ndarray], title: str, path: Path) -> None:
    """Plot both mels and their distance over time, with the joints."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    mels = [_mel(offline) * DECIBELS, _mel(np.concatenate(waveforms)) * DECIBELS]
    seconds = mels[0].shape[1] / MEL_RATE
    cuts = [cut / SAMPLE_RATE for cut in joints(waveforms)]
    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 1, sharex=True)
    low, high = min(mel.min() for mel in mels), max(mel.max() for mel in mels)
    for axis, mel, name in zip(axes, mels, ("offline", "streamed"), strict=False):
        image = axis.imshow(
            mel, origin="lower", aspect="auto", extent=(0, seconds, 0, len(mel)), vmin=low, vmax=high, cmap="magma"
        )
        axis.set_ylabel(f"{name}\nmel band")
    figure.colorbar(image, ax=axes[:2], label="dB")
    distance = np.abs(mels[0] - mels[1]).mean(axis=0)
    axes[2].plot((np.arange(len(distance)) + 0.5) / MEL_RATE, distance, linewidth=1)
    axes[2].set(xlabel="seconds", ylabel="distance of the mels, dB", xlim=(0, seconds), ylim=(0, None))
    for axis in axes[1:]:
        for cut in cuts:
            axis.axvline(cut, color="tab:cyan", linewidth=0.8, linestyle="--")
    axes[2].plot([], [], color="tab:cyan", linewidth=0.8, linestyle="--", label="joint of two chunks")
    axes[2].legend(loc="upper right")
    figure.suptitle(f"{title}: {difference.id}, mean distance {difference.mel_db:.2f} dB", fontsize=10)
    figure.savefig(path, dpi=110)


def _mel(audio: np.ndarray) -> np.ndarray:
    """(N,) -> log mel (80, N // hop)"""
    return mel_spectrogram(torch.from_numpy(audio)[None])[0].numpy()
