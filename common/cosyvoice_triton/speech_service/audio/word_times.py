"""When each word of a segment is spoken: an estimate from its text and its audio, without a recogniser.

Every word takes a share of the sound according to its expected seconds (`text/segments.py`). Pauses that are
heard in the audio correct this: each is assigned to the end of a word, preferably one with punctuation, so that the
words between two pauses share the sound between them.
"""

import re
from dataclasses import dataclass

import numpy as np

from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.text.segments import expected_seconds

# Chosen by hand; tests/demo_voice/test_word_times.py compares the result with the alignment of a recogniser.
FRAME = SAMPLE_RATE // 100
_QUIET = 10 ** (-40 / 20)  # of the loud frames: below it, a frame is silent
_SHORTEST_PAUSE = 0.1  # seconds: the silence before a plosive is mostly shorter
_LENGTHENED = 0.1  # seconds: words at the end of a phrase take longer
_SAME = 1e-6  # seconds: sums of floats differ by less, samples by more

# Costs of an assignment, as negative logarithms of likelihoods.
_VARIANCE = 0.03  # of the sound of some words, in seconds^2 for each expected second
_NO_PUNCTUATION = 3.0  # a pause after a word without punctuation
_MOST_WORDS = 1000  # to assign pauses to: two minutes have fewer, and time and memory grow with their square
_MOST_INSIDE = 3  # pauses inside words between two ends that are known, which bounds the time for a long text
_INSIDE = 2.0  # a pause inside a word, such as before a plosive
_PUNCTUATION = 1.0  # what a pause after punctuation gains

# In Chinese and Japanese each character is a word: where words end is not written.
_CHARACTER = r"[\u3041-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]"
_WORD = re.compile(rf"(?:{_CHARACTER}|(?:(?!{_CHARACTER})\S)+)")
_MARKS = re.compile(r"[^\w]+$")


@dataclass(frozen=True)
class SpokenWord:
    """A word with its punctuation: text[begin:end] of a segment, spoken from `start` to `stop`, in seconds."""

    begin: int
    end: int
    start: float
    stop: float


def word_times(text: str, audio: np.ndarray) -> list[SpokenWord]:
    """Return the words of `text`, spoken in `audio` (N,) float32 at SAMPLE_RATE; in order, without overlaps."""
    words = word_spans(text)
    if not words or not audio.size:
        return []
    begin, end, pauses = _pauses(audio)
    sound = end - begin - sum(length for _, length in pauses)
    marks = np.array([bool(_MARKS.search(text[slice(*word)])) for word in words[:-1]], bool)
    weights = np.array([_weight(text[slice(*word)]) for word in words])
    due = np.concatenate([[0.0], np.cumsum(weights)]) * (sound / weights.sum())  # (words + 1,): where each ends
    at = np.concatenate([[0.0], [where for where, _ in pauses], [sound]])
    # Ends of words that are at pauses; of a text that cannot have been spoken to its end, only the last one.
    known = _assigned(due, marks, at) if len(words) <= _MOST_WORDS else {0: 0, len(words): len(at) - 1}
    ends = np.interp(due, due[list(known)], at[list(known.values())])
    starts, stops = begin + ends[:-1], begin + ends[1:]
    for where, length in pauses:
        starts += np.where(ends[:-1] >= where - _SAME, length, 0.0)
        stops += np.where(ends[1:] > where + _SAME, length, 0.0)
    return [
        SpokenWord(*word, float(start), float(stop)) for word, start, stop in zip(words, starts, stops, strict=True)
    ]


def _weight(word: str) -> float:
    """Return the expected seconds of a word without the pause after it."""
    spoken = _MARKS.sub("", word)
    return expected_seconds(spoken) + (0.0 if spoken == word else _LENGTHENED)


def _pauses(audio: np.ndarray) -> tuple[float, float, list[tuple[float, float]]]:
    """Return where the sound begins and ends, and for each pause the sound before it and its length; all in seconds."""
    frames = audio[: audio.size - audio.size % FRAME].reshape(-1, FRAME)  # (N,) -> (frames, FRAME)
    loudness = np.sqrt(np.mean(np.square(frames), axis=1))
    loud = loudness > _QUIET * np.percentile(loudness, 95) if len(frames) else np.zeros(0, bool)
    seconds = FRAME / SAMPLE_RATE
    found = np.flatnonzero(loud)
    if not found.size:
        return 0.0, audio.size / SAMPLE_RATE, []
    pauses, before = [], 0.0
    for last, following in zip(found[:-1], found[1:], strict=True):
        length = float(following - last - 1) * seconds
        if length >= _SHORTEST_PAUSE:
            pauses.append((float(last + 1 - found[0]) * seconds - before, length))
            before += length
    return float(found[0]) * seconds, float(found[-1] + 1) * seconds, pauses


def _assigned(due: np.ndarray, marks: np.ndarray, at: np.ndarray) -> dict[int, int]:
    """Return for each end of a word at a pause the index of the pause in `at`, by the least cost of all
    assignments.

    due (W + 1,): where the words end by their weights, 0 first. marks (W - 1,): which of the ends within have
    punctuation. at (P + 2,): the pauses between 0 and the end of the sound, which are assigned to the first and last.
    """
    last = len(due) - 1
    expected = due[None, :] - due[:, None]  # (from, to), of the sound between two ends
    forward = expected > 0
    spread = _VARIANCE * np.where(forward, expected, 1.0)
    at_end = np.where(marks, -_PUNCTUATION, _NO_PUNCTUATION)  # (W - 1,)
    at_end = np.concatenate([[np.inf], at_end, [np.inf]])
    least = np.full((len(at), last + 1), np.inf)  # cost of the pauses so far, the last one being at this end
    least[0, 0] = 0.0
    came = np.zeros((len(at), last + 1, 2), int)  # the pause and the end before
    for pause in range(1, len(at)):
        own = np.where(np.arange(last + 1) == last, 0.0, np.inf) if pause == len(at) - 1 else at_end
        for earlier in range(max(0, pause - _MOST_INSIDE - 1), pause):
            off = np.square(at[pause] - at[earlier] - expected) / spread + np.log(spread) / 2
            cost = np.where(forward, least[earlier][:, None] + off, np.inf) + own + _INSIDE * (pause - earlier - 1)
            origin = np.argmin(cost, axis=0)
            cost = cost[origin, np.arange(last + 1)]
            better = cost < least[pause]
            least[pause][better] = cost[better]
            came[pause][better] = np.stack([np.full(last + 1, earlier), origin], axis=1)[better]
    known, pause, word = {}, len(at) - 1, last
    while pause:
        known[word] = pause
        pause, word = (int(value) for value in came[pause, word])
    return dict(sorted((known | {0: 0}).items()))


def word_spans(text: str) -> list[tuple[int, int]]:
    """Return begin and end of each word; what has no letter or digit is joined to the word before it."""
    words: list[tuple[int, int]] = []
    for found in _WORD.finditer(text):
        if any(char.isalnum() for char in found[0]) or not words:
            words.append(found.span())
        else:
            words[-1] = (words[-1][0], found.end())
    return words
