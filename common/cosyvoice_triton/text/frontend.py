"""A text of any length -> the segments that are synthesized one after another."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, lru_cache, partial

from cosyvoice_triton.text import chinese
from cosyvoice_triton.text.cleaning import plain_signs, without_markup
from cosyvoice_triton.text.duration import expected_seconds
from cosyvoice_triton.text.kana import MISSING, has_kanji, in_kana, kana_available
from cosyvoice_triton.text.language import COSYVOICE3, Language, language_of, language_of_sentence, languages_of, named
from cosyvoice_triton.text.markup import Pause, is_heard, parts
from cosyvoice_triton.text.normalization import Spelled, normalized
from cosyvoice_triton.text.pronunciation import Pronouncer
from cosyvoice_triton.text.segments import Seconds, closed, ended_as, fitting, segment_limit, segments, sentences

CACHED_TRANSCRIPTS = 256  # voices are used repeatedly, and normalizing a transcript takes about 10 ms

OnWarning = Callable[[str], object]


def _ignore(message: str) -> None:
    pass


class TextFrontend:
    """Splits texts into segments. Texts must come from `clean_text`.

    `stack`: the stack that speaks them; CosyVoice3 speaks nine languages and reads digits in most of them, the others
    four. `normalize`: leave out Markdown, HTML and emoji, spell out numbers and symbols, clean Chinese as CosyVoice2
    does. `as_is`: what stays as it is written. Safe to use from several threads.

    `warning`: what is wrong with every text in one of the languages; "" if nothing is.
    """

    def __init__(self, stack: str = "") -> None:
        self.languages = languages_of(stack)
        self._korean_words = stack != COSYVOICE3
        self._kana = stack == COSYVOICE3
        self.warning = MISSING if self._kana and not kana_available() else ""
        self._transcript = lru_cache(CACHED_TRANSCRIPTS)(self._transcribed)
        for language in ("zh", "ja"):
            normalized("1 &", language)  # loads the grammar: half a second that no request should wait for

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
    ) -> Iterator[str | Pause]:
        """Yield segments and pauses, at least one; lazy. `request_seconds`: how much speech one LLM request can
        produce. `language`: a name of one, else it is guessed; `voice_text`: the transcript of the voice,
        whose language a text has that is too short for a guess. `pronunciation`: words and what is spoken for them.
        `on_warning` is called with `warning`, once, before the first segment that it is about.

        ValueError if the text has nothing of either, if its markup is not supported, and for an unknown language.
        """
        given = named(language, self.languages)
        try:
            whole = list(parts(plain_signs(text) if normalize else text))
        except ValueError as error:
            raise ValueError(f"target_text: {error}") from None
        words = "".join([part for part in whole if isinstance(part, str)])
        of_text = given or language_of(words, language_of(voice_text[:400]) if voice_text else None)
        seconds = partial(expected_seconds, japanese=of_text == "ja")
        warn = cache(on_warning)
        pronounce = Pronouncer(pronunciation or {})
        some, pauses = False, 0.0
        for part in whole:
            if isinstance(part, Pause):
                pauses += part.seconds
                found: Iterable[str | Pause] = (part,)
            else:
                part = pronounce(part)
                spoken_words = (
                    self._read(part, seconds, of_text, fixed=given is not None, as_is=as_is, warn=warn)
                    if normalize
                    else sentences(part)
                )
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

    def _transcribed(self, text: str) -> str:
        language = language_of(text)
        seconds = partial(expected_seconds, japanese=language == "ja")
        return "".join(self._read(plain_signs(text), seconds, language, close=False)).strip()

    def _read(
        self,
        text: str,
        seconds: Seconds,
        language: Language | None,
        fixed: bool = False,
        close: bool = True,
        as_is: Collection[Spelled] = (),
        warn: OnWarning = _ignore,
    ) -> Iterator[str]:
        """Yield the sentences of `text` in words. `fixed`: all of them are in `language`, which the request named.
        `close`: end each line with a full stop if it has none."""
        text = without_markup(text)
        if language == "zh":
            text = chinese.closed(text)
        for line in text.split("\n"):
            last = ""  # read one sentence late: only the last of a line is closed
            for sentence in sentences(line, close=False):
                if last:
                    yield self._in_words(last, seconds, language, fixed, as_is, warn)[0]
                last = sentence
            if last:
                words, own = self._in_words(last, seconds, language, fixed, as_is, warn)
                yield closed(words, own) if close else words

    def _in_words(
        self,
        sentence: str,
        seconds: Seconds,
        language: Language | None,
        fixed: bool,
        as_is: Collection[Spelled],
        warn: OnWarning,
    ) -> tuple[str, Language | None]:
        """Return a sentence in words, and its language."""
        own = language if fixed else language_of_sentence(sentence, language)
        if own is None:
            return sentence, own
        # In parts that fit a segment: reading a long sentence at once would block every stream of the process.
        words = ""
        for part in fitting(sentence, seconds):
            words += normalized(part, own, as_is, self._korean_words)
        if own == "ja" and self._kana:
            if self.warning and has_kanji(words):
                warn(self.warning)
            words = in_kana(words)
        return ended_as(sentence, chinese.cleaned(words) if own == "zh" else words, own), own
