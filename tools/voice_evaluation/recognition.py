"""The words that pocketsphinx hears in a waveform, and how many of them are wrong."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pocketsphinx import Decoder

from common.constants import PROMPT_SAMPLE_RATE
from common.voice import audio

PEAK = 0.7
SILENCE = PROMPT_SAMPLE_RATE // 4  # samples before and after: the recogniser looks for the speech's edges
DITHER = 3e-4  # deviation of noise over everything: digital silence is nothing that it was trained on


@dataclass(frozen=True)
class WordErrors:
    """Words of a text, and how many had to be put in, taken out or changed to get what was heard."""

    errors: int = 0
    words: int = 0

    def __add__(self, other: "WordErrors") -> "WordErrors":
        return WordErrors(self.errors + other.errors, self.words + other.words)

    @property
    def rate(self) -> float:
        return self.errors / self.words


class Recognizer:
    """English by pocketsphinx's own model. The same waveform gives the same words, whatever was heard before."""

    def __init__(self) -> None:
        self._decoder = Decoder(samprate=PROMPT_SAMPLE_RATE, loglevel="FATAL")

    def hear(self, waveform: np.ndarray, rate: int) -> str:
        """Words in lower case; `waveform` (N,) float32."""
        wave = audio.resample(torch.from_numpy(waveform), rate, PROMPT_SAMPLE_RATE).numpy()
        wave = np.pad(wave * (PEAK / max(1e-4, np.abs(wave).max())), SILENCE)
        wave += np.random.default_rng(0).normal(0, DITHER, len(wave))
        samples = (wave * 32767).clip(-32768, 32767).astype(np.int16)
        self._decoder.start_utt()
        self._decoder.process_raw(samples.tobytes(), full_utt=True)
        self._decoder.end_utt()
        heard = self._decoder.hyp()
        return heard.hypstr if heard else ""


def words(text: str) -> list[str]:
    """As they are compared: lower case, without marks; "o'clock" and "oclock" are one word."""
    return re.sub(r"[^a-z]+", " ", text.lower().replace("'", "")).split()


def word_errors(text: str, heard: str) -> WordErrors:
    said = words(text)
    return WordErrors(_distance(said, words(heard)), len(said))


def _distance(said: Sequence[str], heard: Sequence[str]) -> int:
    """Levenshtein's, of words."""
    row = list(range(len(heard) + 1))  # from nothing said to each beginning of what was heard
    for count, word in enumerate(said, 1):
        above = row
        row = [count]
        for column, other in enumerate(heard):
            row.append(min(row[column] + 1, above[column + 1] + 1, above[column] + (word != other)))
    return row[-1]
