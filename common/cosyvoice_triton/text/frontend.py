"""A text of any length -> the segments that are synthesized one after another, their numbers and signs as words."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, lru_cache, partial
from typing import Any

from cosyvoice_triton.text.cleaning import OnLeftOut, plain_signs, plain_text, without_markup, without_thoughts
from cosyvoice_triton.text.east_asian_reading import CHINESE, JAPANESE, KOREAN
from cosyvoice_triton.text.english_reading import ENGLISH
from cosyvoice_triton.text.kana import MISSING, has_kanji, in_kana, kana_available
from cosyvoice_triton.text.language import COSYVOICE3, Language, language_of, language_of_sentence, languages_of, named
from cosyvoice_triton.text.markup import Pause, is_document, is_heard, left_out, parts
from cosyvoice_triton.text.pronunciation import Pronouncer
from cosyvoice_triton.text.quantities import Reader
from cosyvoice_triton.text.segments import (
    REQUEST_SHARE,
    SEGMENT_SECONDS,
    SHORTEST_LIMIT,
    closed,
    expected_seconds,
    fitting,
    segments,
    sentences,
)

_ENDS = ".!?。！？…．｡"
# Left unchanged: the LLM's tags of sounds ("[laughter]", "<strong>") and phonemes ("[AH0]", "[ǐ]").
_AS_IS = r"\[(?:[a-z_à-ǜ-]+|[A-Z]{1,2}[0-2]?)\]|</?(?:strong|laughter)>"

# What requests can have left unchanged, too: by the parameter, a flag, that is false then.
SPELLING = {
    "phone_normalization": r"(?<![\w.,-])\+?\(?\d[\d ().-]{5,}\d(?![\w-])",
    "url_normalization": r"(?:https?://|www\.)[^\s<>\"]*[^\s<>\".,;:!?)\]']",
    "email_normalization": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
}
_READERS: dict[str | None, Reader] = {"en": ENGLISH, "zh": CHINESE, "ja": JAPANESE, "ko": KOREAN}


def normalized(sentence: str, language: Language, as_is: Collection[str] = (), korean_words: bool = True) -> str:
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
def _unchanged(as_is: frozenset[str]) -> re.Pattern[str]:
    return re.compile("|".join([f"({_AS_IS}", *(SPELLING[name] for name in sorted(as_is))]) + ")")


CACHED_TRANSCRIPTS = 256  # voices are used repeatedly, and normalizing a transcript takes about 10 ms

OnWarning = Callable[[str], object]


def _ignore(*message: str) -> None:
    pass


class TextFrontend:
    """Splits texts into segments. Texts must come from `clean_text`.

    `stack`: the stack that speaks them; CosyVoice3 speaks nine languages and reads digits in most of them, the others
    four. `normalize`: leave out Markdown, HTML and emoji, spell out numbers and symbols, clean Chinese as CosyVoice2
    does. `as_is`: names of SPELLING, for what stays as it is written. Safe to use from several threads.

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
        as_is: Collection[str] = (),
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
        plain = text
        if normalize:
            for tag in left_out(text):
                on_left_out(tag, "tag that means nothing here")
            plain = without_thoughts(text, on_left_out) if self._skip_thoughts else text
            plain = plain_signs(plain if is_document(plain) else plain_text(plain, on_left_out), on_left_out)
        try:
            whole = list(parts(plain))
        except ValueError as error:
            raise ValueError(f"target_text: {error}") from None
        words = ""
        for part in whole:
            words += part if isinstance(part, str) else ""
        of_text = given or language_of(words, language_of(voice_text[:400]) if voice_text else None, self.languages)
        read = partial(self._in_words, of_text, given is not None, as_is, cache(on_warning))
        seconds = partial(expected_seconds, japanese=of_text == "ja")
        limit = max(SHORTEST_LIMIT, min(SEGMENT_SECONDS, REQUEST_SHARE * request_seconds))
        pronounce = Pronouncer(pronunciation) if pronunciation else str
        some, pauses = False, 0.0
        for part in whole:
            if isinstance(part, Pause):
                pauses += part.seconds
                yield part
                continue
            part = pronounce(part)
            said = sentences(without_markup(part, on_left_out), read) if normalize else sentences(part)
            for segment in segments(said, seconds, limit):
                yield segment
                some = True
        if not (some or is_heard(pauses)):
            raise ValueError(f"target_text has nothing to speak: {text[:80]!r}")

    def preview(self, text: str, language: str = "", **options: Any) -> dict[str, Any]:
        """Return what will be spoken, for people: `segments` ("" for a pause), the expected `seconds` of each and the
        `language` of the text; and, if there are any, `warnings` and `left_out`, a `text` and its `reason` each.
        `options` and errors are those of `segments`."""
        warnings: list[str] = []
        told: list[tuple[str, str]] = []
        options |= {"on_warning": warnings.append, "on_left_out": lambda *each: told.append(each)}
        spoken = list(self.segments(text, language=language, **options))
        own = named(language) or language_of(text, None, self.languages)
        seconds = [each.seconds if isinstance(each, Pause) else expected_seconds(each, own == "ja") for each in spoken]
        answer = {
            "segments": ["" if isinstance(each, Pause) else each for each in spoken],
            "seconds": [round(each, 2) for each in seconds],
            "language": own,
        }
        left = [{"text": written, "reason": reason} for written, reason in told]
        return answer | ({"warnings": warnings} if warnings else {}) | ({"left_out": left} if left else {})

    def transcript(self, text: str, normalize: bool = True) -> str:
        """Return a recording's transcript, spelled out as in the recording. Unlike a text it gets no full stop at its
        end."""
        return self._transcript(text) if normalize else text

    def _transcribed(self, text: str) -> str:
        read = partial(self._in_words, language_of(text, None, self.languages), False, (), _ignore)
        return "".join(sentences(without_markup(plain_signs(text)), read, close=False)).strip()

    def _in_words(
        self, language: Language | None, fixed: bool, as_is: Collection[str], warn: OnWarning, sentence: str
    ) -> tuple[str, Language | None]:
        """Return a sentence in words, and its language: that of the text if the request has `fixed` it."""
        own = language if fixed else language_of_sentence(sentence, language, self.languages)
        if own is None:
            return sentence, own
        # In parts that fit a segment: reading a long sentence at once would block every stream of the process. No
        # character takes longer than half a second.
        is_long = len(sentence) >= 2 * SEGMENT_SECONDS
        fitted = fitting(sentence, partial(expected_seconds, japanese=own == "ja")) if is_long else [sentence]
        words = "".join(map(partial(normalized, language=own, as_is=as_is, korean_words=self._korean_words), fitted))
        if own == "ja" and self._kana:
            if self.warning and has_kanji(words):
                warn(self.warning)
            words = in_kana(words)
        words = CHINESE.words.clean(words) if own == "zh" else words
        if (body := words.rstrip()) and sentence.rstrip()[-1:] in _ENDS:  # it may have been taken for that of "U.S."
            words = closed(body, own).rstrip() + words[len(body) :]
        return words, own
