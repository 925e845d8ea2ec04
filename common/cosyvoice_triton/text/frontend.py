"""A text of any length -> the segments that are synthesized one after another."""

import math
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache, partial

from cosyvoice_triton.text import chinese
from cosyvoice_triton.text.duration import expected_seconds
from cosyvoice_triton.text.markdown import spoken
from cosyvoice_triton.text.markup import Pause, is_heard, parts
from cosyvoice_triton.text.normalization import Language, Spelled, half_width, language_of, normalized
from cosyvoice_triton.text.segments import Seconds, fitting, segment_limit, segments, sentences

CACHED_TRANSCRIPTS = 256  # voices are used repeatedly, and normalizing a transcript takes about 10 ms


class TextFrontend:
    """Splits texts into segments. Texts must come from `clean_text`.

    `normalize`: leave out Markdown, HTML and emoji, spell out numbers and symbols, clean Chinese as CosyVoice2 does.
    `as_is`: what stays as it is written. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._transcript = lru_cache(CACHED_TRANSCRIPTS)(_transcript)
        for language in ("zh", "en", "ja"):
            normalized("1", language)  # loads the grammar: half a second that no request should wait for

    def segments(
        self,
        text: str,
        normalize: bool = True,
        request_seconds: float = math.inf,
        as_is: Collection[Spelled] = (),
    ) -> Iterator[str | Pause]:
        """Yield segments and pauses, at least one; lazy. `request_seconds`: how much speech one LLM request can
        produce.

        ValueError if the text has nothing of either, and if its markup is not supported.
        """
        try:
            whole = list(parts(text))
        except ValueError as error:
            raise ValueError(f"target_text: {error}") from None
        words = "".join(part for part in whole if isinstance(part, str))
        seconds, language = _seconds_in(words), language_of(words)
        some, pauses = False, 0.0
        for part in whole:
            if isinstance(part, Pause):
                pauses += part.seconds
                found: Iterable[str | Pause] = (part,)
            else:
                spoken_words = _normalized(part, seconds, language, as_is=as_is) if normalize else sentences(part)
                found = segments(spoken_words, seconds, segment_limit(request_seconds))
            for each in found:
                yield each
                some = some or isinstance(each, str)
        if not (some or is_heard(pauses)):
            raise ValueError(f"target_text has nothing to speak: {text[:80]!r}")

    def transcript(self, text: str, normalize: bool = True) -> str:
        """Return a recording's transcript, spelled out as in the recording. Unlike a text it gets no full stop at its
        end."""
        return self._transcript(text) if normalize else text


def _transcript(text: str) -> str:
    return "".join(_normalized(text, _seconds_in(text), language_of(text), close=False)).strip()


def _seconds_in(text: str) -> Seconds:
    """Return the estimate for parts of `text`: a part without kana does not show that its Han characters are
    Japanese."""
    return partial(expected_seconds, japanese=language_of(text) == "ja")


def _normalized(
    text: str, seconds: Seconds, language: Language | None, close: bool = True, as_is: Collection[Spelled] = ()
) -> Iterator[str]:
    """Yield the sentences of `text` in words, those of `sentences` with the same `close`. language: without letters."""
    text = half_width(spoken(text))
    if language == "zh":
        text = chinese.closed(text)
    for sentence in sentences(text, close):
        own = language_of(sentence) if any(char.isalpha() for char in sentence) else language
        # In parts that fit a segment: normalizing a long sentence at once would block every stream of the process.
        words = "".join(normalized(part, own, as_is) for part in fitting(sentence, seconds)) if own else sentence
        yield chinese.cleaned(words) if own == "zh" else words
