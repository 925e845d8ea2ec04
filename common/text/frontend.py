"""A text, as long as it may be, to the segments that are spoken one after another."""

from collections.abc import Iterator
from functools import lru_cache

from common.text.segments import CountTokens, fitting, segments, sentences
from common.text.spoken import half_width, language_of, spoken_form

TRANSCRIPTS_KEPT = 256  # voices come back, and a transcript takes some 10 ms


class TextFrontend:
    """Cuts texts into segments. `count` is the number of the LLM's tokens in a text. Texts are from `clean_text`.

    `in_words`: numbers and signs are spelled out. Safe to use from several threads.
    """

    def __init__(self, count: CountTokens) -> None:
        self._count = count
        self._transcript = lru_cache(TRANSCRIPTS_KEPT)(lambda text: "".join(self._spoken(text)).strip())
        for language in ("zh", "en", "ja"):
            spoken_form("1", language)  # reads the grammar: half a second that no request should wait for

    def segments(self, text: str, in_words: bool = True) -> Iterator[str]:
        """At least one, made as it is asked for."""
        return segments(self._spoken(text) if in_words else sentences(text), self._count)

    def transcript(self, text: str, in_words: bool = True) -> str:
        """What a recording says, in the words in which it says it."""
        return self._transcript(text) if in_words else text

    def _spoken(self, text: str) -> Iterator[str]:
        text = half_width(text)
        language = language_of(text)  # for sentences without letters of their own
        for sentence in sentences(text):
            own = language_of(sentence) if any(char.isalpha() for char in sentence) else language
            # In parts that fit a segment, since a reading of all at once would hold up every stream of the process.
            parts = fitting(sentence, self._count)
            yield "".join(spoken_form(part, own) for part in parts) if own else sentence
