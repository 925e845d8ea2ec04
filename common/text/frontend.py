"""A text of any length -> the segments that are synthesized one after another."""

from collections.abc import Iterator
from functools import lru_cache

from common.text.normalization import half_width, language_of, normalized
from common.text.segments import CountTokens, fitting, segments, sentences

CACHED_TRANSCRIPTS = 256  # voices are used repeatedly, and normalizing a transcript takes about 10 ms


class TextFrontend:
    """Splits texts into segments. `count`: number of LLM tokens in a text. Texts must come from `clean_text`.

    `normalize`: spell out numbers and symbols. Safe to use from several threads.
    """

    def __init__(self, count: CountTokens) -> None:
        self._count = count
        self._transcript = lru_cache(CACHED_TRANSCRIPTS)(lambda text: "".join(self._normalized(text)).strip())
        for language in ("zh", "en", "ja"):
            normalized("1", language)  # loads the grammar: half a second that no request should wait for

    def segments(self, text: str, normalize: bool = True) -> Iterator[str]:
        """At least one segment; lazy."""
        return segments(self._normalized(text) if normalize else sentences(text), self._count)

    def transcript(self, text: str, normalize: bool = True) -> str:
        """A recording's transcript, spelled out as in the recording."""
        return self._transcript(text) if normalize else text

    def _normalized(self, text: str) -> Iterator[str]:
        text = half_width(text)
        language = language_of(text)  # for sentences without letters
        for sentence in sentences(text):
            own = language_of(sentence) if any(char.isalpha() for char in sentence) else language
            # In parts that fit a segment: normalizing a long sentence at once would block every stream of the process.
            parts = fitting(sentence, self._count)
            yield "".join(normalized(part, own) for part in parts) if own else sentence
