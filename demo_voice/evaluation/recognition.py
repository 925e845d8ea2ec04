"""Words recognised by pocketsphinx, and word errors."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.voice import audio

PEAK = 0.7
SILENCE = PROMPT_SAMPLE_RATE // 4  # samples before and after the speech: the recogniser detects its ends
DITHER = 3e-4  # standard deviation of added noise: the recogniser was not trained on digital silence


@dataclass(frozen=True)
class WordErrors:
    """Number of words of a text, and insertions, deletions and substitutions in the recognised words."""

    errors: int = 0
    words: int = 0

    def __add__(self, other: "WordErrors") -> "WordErrors":
        return WordErrors(self.errors + other.errors, self.words + other.words)

    @property
    def rate(self) -> float:
        return self.errors / self.words


class Recognizer:
    """English, with pocketsphinx's own model. Results do not depend on earlier waveforms."""

    def __init__(self) -> None:
        from pocketsphinx import Decoder  # here, so that programs explain themselves without the tests' packages

        self._decoder = Decoder(samprate=PROMPT_SAMPLE_RATE, loglevel="FATAL")

    def transcribe(self, waveform: np.ndarray, rate: int) -> str:
        """Recognised words in lower case; waveform (N,) float32."""
        wave = audio.resample(torch.from_numpy(waveform), rate, PROMPT_SAMPLE_RATE).numpy()
        wave = np.pad(wave * (PEAK / max(1e-4, np.abs(wave).max())), SILENCE)
        wave += np.random.default_rng(0).normal(0, DITHER, len(wave))
        samples = (wave * 32767).clip(-32768, 32767).astype(np.int16)
        self._decoder.start_utt()
        self._decoder.process_raw(samples.tobytes(), full_utt=True)
        self._decoder.end_utt()
        recognised = self._decoder.hyp()
        return recognised.hypstr if recognised else ""


def words(text: str) -> list[str]:
    """Words for comparison: lower case, without punctuation; "o'clock" and "oclock" are equal."""
    return re.sub(r"[^a-z]+", " ", text.lower().replace("'", "")).split()


def word_errors(text: str, recognised: str) -> WordErrors:
    said = words(text)
    return WordErrors(_distance(said, words(recognised)), len(said))


def _distance(said: Sequence[str], recognised: Sequence[str]) -> int:
    """Levenshtein distance of word sequences."""
    row = list(range(len(recognised) + 1))  # distances of the empty text to each prefix of what was recognised
    for count, word in enumerate(said, 1):
        above = row
        row = [count]
        for column, other in enumerate(recognised):
            row.append(min(row[column] + 1, above[column + 1] + 1, above[column] + (word != other)))
    return row[-1]
