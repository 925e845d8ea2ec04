"""Stage `check`: whether the teacher says the same on a device as on the CPU, and how fast."""

import logging
import time
from pathlib import Path

import numpy as np
import torch
from cosyvoice_triton.voice.features import mel_spectrogram

from demo_voice.training.kokoro import DEMO_VOICES, SAMPLE_RATE, Teacher, Utterance

logger = logging.getLogger(__name__)

SENTENCES, AT_ONCE = 20, 2000
AUDIBLE = -6.0  # log mel; the rest is noise, which differs
MOST_MEL, LEAST_EQUAL = 0.35, 0.98


def check(work: Path, teacher: Path, device: str) -> None:
    """Log the differences over SENTENCES and the speed over AT_ONCE; ValueError if the differences are audible."""
    lines = (work / "phonemes.txt").read_text(encoding="utf-8").splitlines()[:AT_ONCE]
    reference, found = Teacher(teacher, "cpu"), Teacher(teacher, device)
    utterances = [Utterance(found.ids(line), index % len(DEMO_VOICES), 1.0) for index, line in enumerate(lines)]
    torch.manual_seed(0)
    expected = {spoken.index: spoken for spoken in reference.speak(utterances[:SENTENCES])}
    equal, differences = [], []
    for spoken in found.speak(utterances[:SENTENCES]):
        frames = expected[spoken.index].frames
        equal.append((spoken.frames == frames).mean())
        if len(spoken.wave) == len(expected[spoken.index].wave):
            mels = [
                mel_spectrogram(torch.from_numpy(wave)[None])[0] for wave in (spoken.wave, expected[spoken.index].wave)
            ]
            differences.append((mels[0] - mels[1]).abs()[mels[1] > AUDIBLE].mean().item())
    logger.info("check: %d of %d sentences on both", len(equal), len(expected))
    logger.info("check: %.1f %% of durations equal, log mel differs by %.3f in %d sentences of equal length",
                100 * np.mean(equal), np.mean(differences), len(differences))  # fmt: skip
    begun = time.monotonic()
    samples = sum(len(spoken.wave) for spoken in found.speak(utterances))
    passed = time.monotonic() - begun
    logger.info("check: %d utterances in %.1f s, %.0f x real time", len(lines), passed, samples / SAMPLE_RATE / passed)
    if len(equal) < len(expected) or not (np.mean(equal) >= LEAST_EQUAL and np.mean(differences) <= MOST_MEL):
        raise ValueError("the teacher differs between this device and the CPU")
