"""A text of any length -> the segments that are synthesized one after another, their numbers and signs as words."""

import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from cosyvoice_triton.text.cleaning import plain_signs, without_markup
from cosyvoice_triton.text.east_asian_reading import CHINESE, JAPANESE, KOREAN
from cosyvoice_triton.text.english_reading import ENGLISH
from cosyvoice_triton.text.kana import MISSING, has_kanji, in_kana, kana_available
from cosyvoice_triton.text.language import COSYVOICE3, Language, language_of, language_of_sentence, languages_of, named
from cosyvoice_triton.text.markup import Pause, is_document, is_heard, left_out, parts
from cosyvoice_triton.text.pronunciation import Pronouncer
from cosyvoice_triton.text.quantities import Reader
from cosyvoice_triton.text.segments import (
    SEGMENT_SECONDS,
    ended_as,
    expected_seconds,
    fitting,
    segment_limit,
    segments,
    sentences,
)
from cosyvoice_triton.text.sources import OnLeftOut, plain_text, without_thoughts

logger = logging.getLogger(__name__)

Spelled = Literal["urls", "emails", "phones"]  # what a request can have left as it is
# Request parameters that are flags, and what each leaves as it is written if it is false.
SPELLING: dict[str, Spelled] = {
    "url_normalization": "urls",
    "email_normalization": "emails",
    "phone_normalization": "phones",
}

# Left unchanged: the LLM's tags of sounds ("[laughter]", "<strong>") and phonemes ("[AH0]", "[ǐ]").
_AS_IS = r"\[(?:[a-z_à-ǜ-]+|[A-Z]{1,2}[0-2]?)\]|</?(?:strong|laughter)>"

# What requests can ask to have left unchanged, too.
_PHONE = r"(?<![\w.,-])\+?\(?\d[\d ().-]{5,}\d(?![\w-])"
_KINDS = {
    "phones": _PHONE,
    "urls": r"(?:https?://|www\.)[^\s<>\"]*[^\s<>\".,;:!?)\]']",
    "emails": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
}
_READERS: dict[str | None, Reader] = {"en": ENGLISH, "zh": CHINESE, "ja": JAPANESE, "ko": KOREAN}


def normalized(sentence: str, language: Language, as_is: Collection[Spelled] = (), korean_words: bool = True) -> str:
    """Return `sentence` with its numbers and symbols as words, surrounding whitespace kept. Tags of sounds and what
    is in `as_is` stay unchanged, and so do digits in languages in which the LLM reads them."""
    reader = _READERS.get(language)
    if reader is None or (language == "ko" and not korean_words):
        return sentence
    parts = _unchanged(frozenset(as_is)).split(sentence)
    for index in range(0, len(parts), 2):  # every second part matched and stays unchanged
        parts[index] = reader.read(parts[index])
    return "".join(parts)


@cache
def _unchanged(as_is: frozenset[Spelled]) -> re.Pattern[str]:
    return re.compile("|".join([f"({_AS_IS}", *(_KINDS[kind] for kind in sorted(as_is & _KINDS.keys()))]) + ")")


CACHED_TRANSCRIPTS = 256  # voices are used repeatedly, and normalizing a transcript takes about 10 ms

OnWarning = Callable[[str], object]


def _ignore(*message: str) -> None:
    pass


class TextFrontend:
    """Splits texts into segments. Texts must come from `clean_text`.

    `stack`: the stack that speaks them; CosyVoice3 speaks nine languages and reads digits in most of them, the others
    four. `normalize`: leave out Markdown, HTML and emoji, spell out numbers and symbols, clean Chinese as CosyVoice2
    does. `as_is`: what stays as it is written. Safe to use from several threads.

    `warning`: what is wrong with every text in one of the languages; "" if nothing is.
    """

    def __init__(self, stack: str = "", skip_thoughts: bool = False) -> None:
        self.languages = languages_of(stack)
        self._korean_words = stack != COSYVOICE3
        self._kana = stack == COSYVOICE3
        self._skip_thoughts = skip_thoughts
        self.warning = MISSING if self._kana and not kana_available() else ""
        self._transcript = lru_cache(CACHED_TRANSCRIPTS)(self._transcribed)

    def segments(
        self,
        text: str,
        normalize: bool = True,
        request_seconds: float = math.inf,
        as_is: Collection[Spelled] = (),
        language: str = "",
        voice_text: str = "",
        pronunciation: Mapping[str, str] | None = None,
        on_warning: OnWarning = _ignore,
        on_left_out: OnLeftOut = _ignore,
    ) -> Iterator[str | Pause]:
        """Yield segments and pauses, at least one; lazy. `request_seconds`: how much speech one LLM request can
        produce. `language`: a name of one, else it is guessed; `voice_text`: the transcript of the voice,
        whose language a text has that is too short for a guess. `pronunciation`: words and what is spoken for them.
        `on_warning` is called with `warning`, once, before the first segment that it is about, and `on_left_out` with
        each part of the text that is not spoken, and the reason.

        ValueError if the text has nothing of either, if its markup is not supported, and for an unknown language.
        """
        given = named(language, self.languages)
        try:
            whole = list(parts(self._plain(text, on_left_out) if normalize else text))
        except ValueError as error:
            raise ValueError(f"target_text: {error}") from None
        words = "".join([part for part in whole if isinstance(part, str)])
        of_text = given or language_of(words, language_of(voice_text[:400]) if voice_text else None, self.languages)
        asked = _Asked(of_text, given is not None, as_is, cache(on_warning))
        pronounce = Pronouncer(pronunciation) if pronunciation else str
        some, pauses = False, 0.0
        for part in whole:
            if isinstance(part, Pause):
                pauses += part.seconds
                found: Iterable[str | Pause] = (part,)
            else:
                part = pronounce(part)
                read = self._read(without_markup(part, on_left_out), asked) if normalize else sentences(part)
                found = segments(read, asked.seconds, segment_limit(request_seconds))
            for each in found:
                yield each
                some = some or isinstance(each, str)
        if not (some or is_heard(pauses)):
            raise ValueError(f"target_text has nothing to speak: {text[:80]!r}")

    def _plain(self, text: str, on_left_out: OnLeftOut) -> str:
        """Return the words of `text`, in plain signs, with its Markdown, pauses and SSML."""
        for tag in left_out(text):
            on_left_out(tag, "tag that means nothing here")
        if self._skip_thoughts:
            text = without_thoughts(text, on_left_out)
        return plain_signs(text if is_document(text) else plain_text(text, on_left_out), on_left_out)

    def transcript(self, text: str, normalize: bool = True) -> str:
        """Return a recording's transcript, spelled out as in the recording. Unlike a text it gets no full stop at its
        end."""
        return self._transcript(text) if normalize else text

    def _transcribed(self, text: str) -> str:
        asked = _Asked(language_of(text, None, self.languages))
        return "".join(self._read(without_markup(plain_signs(text)), asked, close=False)).strip()

    def _read(self, text: str, asked: "_Asked", close: bool = True) -> Iterator[str]:
        """Yield the sentences of `text` in words. `close`: end each line with a full stop if it has none."""
        return sentences(text, lambda sentence: self._in_words(sentence, asked), close)

    def _in_words(self, sentence: str, asked: "_Asked") -> tuple[str, Language | None]:
        """Return a sentence in words, and its language."""
        own = asked.language if asked.fixed else language_of_sentence(sentence, asked.language, self.languages)
        if own is None:
            return sentence, own
        # In parts that fit a segment: reading a long sentence at once would block every stream of the process. No
        # character takes longer than half a second.
        parts = [sentence] if len(sentence) < 2 * SEGMENT_SECONDS else fitting(sentence, asked.seconds)
        words = "".join([normalized(part, own, asked.as_is, self._korean_words) for part in parts])
        if own == "ja" and self._kana:
            if self.warning and has_kanji(words):
                asked.warn(self.warning)
            words = in_kana(words)
        return ended_as(sentence, words if own != "zh" else CHINESE.words.clean(words), own), own


@dataclass(frozen=True)
class _Asked:
    """How a text is read: in which language, which the request may have `fixed` for all sentences."""

    language: Language | None
    fixed: bool = False
    as_is: Collection[Spelled] = ()
    warn: OnWarning = _ignore

    def seconds(self, text: str) -> float:
        return expected_seconds(text, self.language == "ja")
