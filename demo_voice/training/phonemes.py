"""Stage `phonemes`: the corpus as the teacher's phonemes, and the phones that label its speech.

The packages `misaki`, `phonemizer-fork` and `espeakng-loader` convert text to phonemes. Stages that only read labels do
not need them.
"""

import logging
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np

logger = logging.getLogger(__name__)

# Labels of sound, one letter each; the first is silence.
PHONES = (" ", *"AIOWYæɑɔəɛɜɪiuʊʌᵻᵊbdfhjklmnpstvwzðŋɡɹɾʃʒθʤʧʔ")
LABEL_RATE = 100
# Letters of the teacher for the same sound.
_SAME = {"T": "ɾ", "r": "ɹ", "a": "ɑ", "ɐ": "ə", "ɚ": "ə", "e": "A", "o": "O", "x": "k"}
_STRESS, _LENGTH, _SPACE = "ˈˌ", "ː", " "
_UNKNOWN = re.compile(r"[^\w\sˈˌː,.?!:;\"()]")


def make_phonemes(work: Path) -> None:
    """Write `phonemes.txt` in `work`, line by line for `sentences.txt`."""
    sentences = (work / "sentences.txt").read_text(encoding="utf-8").splitlines()
    lines = phonemized(sentences)
    (work / "phonemes.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    logger.info("%d lines, %.1f phonemes each", len(lines), np.mean([len(line) for line in lines]))


def phonemized(sentences: Sequence[str]) -> list[str]:
    """The teacher's phonemes of each sentence, in American English, with its punctuation."""
    # The class for words that a dictionary lacks takes whole sentences too, and its phonemes are those of the English
    # data that the teacher was trained on; EspeakG2P's are not.
    convert = import_module("misaki.espeak").EspeakFallback(british=False)
    logging.getLogger("phonemizer").setLevel(logging.ERROR)  # it warns of every contraction
    raw = (convert(SimpleNamespace(text=sentence))[0] or "." for sentence in sentences)
    return [_UNKNOWN.sub("", line).replace("ɹɹ", "ɹ") for line in raw]


def letter_labels(letters: Sequence[str]) -> np.ndarray:
    """The label (N,) of each letter of an utterance; pauses are 0, as is anything that is no letter.

    A mark of stress belongs to the phone after it, one of length to the phone before it, and a blank within a phrase to
    the word before it.
    """
    labels = np.array([_label(letter) for letter in letters], np.uint8)
    for index in reversed(range(len(letters) - 1)):
        if letters[index] in _STRESS:
            labels[index] = labels[index + 1]
    for index in range(1, len(letters) - 1):
        between = letters[index] == _SPACE and labels[index - 1] and labels[index + 1]
        if letters[index] == _LENGTH or between:
            labels[index] = labels[index - 1]
    return labels


def _label(letter: str) -> int:
    letter = _SAME.get(letter, letter)
    return PHONES.index(letter) if letter in PHONES else 0


def sampled(labels: np.ndarray, seconds: np.ndarray, begin: float, count: int) -> np.ndarray:
    """Labels (count,) at 100 Hz from the time `begin` on, of letters that last `seconds` each; 0 after the last."""
    times = begin + (np.arange(count) + 0.5) / LABEL_RATE
    letters = np.searchsorted(np.cumsum(seconds), times, side="right")
    return np.append(labels, np.uint8(0))[np.minimum(letters, len(labels))]
