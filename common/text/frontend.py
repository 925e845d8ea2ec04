"""A text of any length -> the segments that are synthesized one after another."""

import math
from collections.abc import Iterator
from functools import lru_cache, partial

from common.text import chinese
from common.text.duration import expected_seconds
from common.text.normalization import half_width, language_of, normalized
from common.text.segments import Seconds, fitting, segment_limit, segments, sentences

CACHED_TRANSCRIPTS = 256  # voices are used repeatedly, and normalizing a transcript takes about 10 ms


class TextFrontend:
    """Splits texts into segments. Texts must come from `clean_text`.

    `normalize`: spell out numbers and symbols, and clean Chinese as CosyVoice2 does. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._transcript = lru_cache(CACHED_TRANSCRIPTS)(_transcript)
        for language in ("zh", "en", "ja"):
            normalized("1", language)  # loads the grammar: half a second that no request should wait for

    def segments(self, text: str, normalize: bool = True, request_seconds: float = math.inf) -> Iterator[str]:
        """At least one segment; lazy. `request_seconds`: how much speech one LLM request can produce."""
        seconds = _seconds_in(text)
        spoken = _normalized(text, seconds) if normalize else sentences(text)
        return segments(spoken, seconds, segment_limit(request_seconds))

    def transcript(self, text: str, normalize: bool = True) -> str:
        """A recording's transcript, spelled out as in the recording. Unlike a text it gets no full stop at its end."""
        return self._transcript(text) if normalize else text


def _transcript(text: str) -> str:
    return "".join(_normalized(text, _seconds_in(text), close=False)).strip()


def _seconds_in(text: str) -> Seconds:
    """The estimate for parts of `text`: a part without kana does not show that its Han characters are Japanese."""
    return partial(expected_seconds, japanese=language_of(text) == "ja")


def _normalized(text: str, seconds: Seconds, close: bool = True) -> Iterator[str]:
    """The sentences of `text` in words, those of `sentences` with the same `close`."""
    text = half_width(text)
    language = language_of(text)  # for sentences without letters
    if language == "zh":
        text = chinese.closed(text)
    for sentence in sentences(text, close):
        own = language_of(sentence) if any(char.isalpha() for char in sentence) else language
        # In parts that fit a segment: normalizing a long sentence at once would block every stream of the process.
        words = "".join(normalized(part, own) for part in fitting(sentence, seconds)) if own else sentence
        yield chinese.cleaned(words) if own == "zh" else words
