"""The start of an utterance: CosyVoice3's sometimes begin in the middle of a wave, which is heard as a click."""

import numpy as np

from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.token2wav.stream import Stream

FADE_SAMPLES = SAMPLE_RATE // 50  # 20 ms, as cosyvoice.cpp
BEGINNING = SAMPLE_RATE // 500  # 2 ms: no speech rises so fast
LOUD = 0.01  # -40 dBFS; where speech begins with silence, nothing is changed


def without_click(audio: np.ndarray) -> np.ndarray:
    """Return the first audio (N,) of an utterance, faded in over 20 ms if it begins loudly."""
    if not (np.abs(audio[:BEGINNING]) > LOUD).any():
        return audio
    faded = audio.copy()
    faded[:FADE_SAMPLES] *= np.linspace(0, 1, FADE_SAMPLES, dtype=np.float32)[: len(audio)]
    return faded


def heard(stream: Stream, audio: np.ndarray) -> np.ndarray:
    """Return the audio that is heard next of a stream."""
    if stream.heard or not audio.size:
        return audio
    stream.heard = True
    return without_click(audio)
