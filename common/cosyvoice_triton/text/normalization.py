"""Numbers, dates, units and currencies as words, by WeTextProcessing's grammars for Chinese, English and Japanese.

The grammars are part of the package `wetext`, so nothing is downloaded.
"""

import logging
import re
from collections.abc import Collection
from functools import cache
from typing import Any, Literal

from cosyvoice_triton.text.chinese_reading import read_chinese
from cosyvoice_triton.text.cleaning import is_speakable
from cosyvoice_triton.text.english_reading import read_english
from cosyvoice_triton.text.japanese_reading import read_japanese
from cosyvoice_triton.text.korean_reading import read_korean
from cosyvoice_triton.text.language import Language

logger = logging.getLogger(__name__)

Spelled = Literal["urls", "emails", "phones"]  # what a request can have left as it is
# Request parameters that are flags, and what each leaves as it is written if it is false.
SPELLING: dict[str, Spelled] = {
    "url_normalization": "urls",
    "email_normalization": "emails",
    "phone_normalization": "phones",
}

# Left unchanged: the LLM's tags of sounds ("[laughter]", "<strong>") and phonemes ("[AH0]", "[ǐ]"), and characters that
# the package would escape (quotation marks, backslashes).
_AS_IS = r"""\[(?:[a-z_à-ǜ-]+|[A-Z]{1,2}[0-2]?)\]|</?[a-z]+>|["\\]"""

# The English grammar cannot read a number with a symbol on the wrong side: "#1", "100€".
_TOUCHING = re.compile(r"(?<=\d)(?=[^\w\s.,:])|(?<=[^\w\s.,:])(?=\d)")

# What requests can ask to have left unchanged, too.
_PHONE = r"(?<![\w.,-])\+?\(?\d[\d ().-]{5,}\d(?![\w-])"
_KINDS = {
    "phones": _PHONE,
    "urls": r"(?:https?://|www\.)[^\s<>\"]*[^\s<>\".,;:!?)\]']",
    "emails": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
}
_WEB = re.compile(f"({_KINDS['urls']}|{_KINDS['emails']})")
_FOR_GRAMMAR = re.compile(r"[0-9$€£%&@+=<>℃℉°]")  # what the rules of Chinese and Japanese left
_PROTOCOL = re.compile(r"\bhttps?://(?=\w)", re.IGNORECASE)

# The English grammar gives up on a sentence with such an address beside a comma or another address.
_ADDRESS = re.compile(r"((?:[\w-]+[.@/:])+[\w/?=&%#~-]*\w)", re.ASCII)

# Plain words that need no normalization: letters and clause punctuation, no full stop except the last.
_PLAIN = {
    "en": re.compile(r"[A-Za-z\s,;:?!'’“”()—–-]+\.?"),
    "zh": re.compile(r"[\u4e00-\u9fff\s，。、；：？！“”‘’（）…—]+"),
}


def normalized(sentence: str, language: Language, as_is: Collection[Spelled] = (), korean_words: bool = True) -> str:
    """Return `sentence` with its numbers and symbols as words, surrounding whitespace kept; unreadable parts and those
    in `as_is` stay unchanged.

    Anything but plain words takes about 0.1 ms per character and holds the GIL, so callers go sentence by sentence.
    """
    parts = _unchanged(frozenset(as_is)).split(sentence)  # every second part matched and stays unchanged
    parts[::2] = [_read(part, language, korean_words) for part in parts[::2]]
    return "".join(parts)


@cache
def _unchanged(as_is: frozenset[Spelled]) -> re.Pattern[str]:
    return re.compile("|".join([f"({_AS_IS}", *(_KINDS[kind] for kind in sorted(as_is & _KINDS.keys()))]) + ")")


def _read(text: str, language: Language, korean_words: bool) -> str:
    """Return `text` by the rules of its language, and by the grammar what they leave."""
    if language == "zh":
        text = read_chinese(text)
    elif language == "ja":
        text = read_japanese(text)
    elif language == "en":
        # Addresses stay as they are; the rules would read their digits.
        parts = _WEB.split(_PROTOCOL.sub("", text))
        parts[::2] = map(read_english, parts[::2])
        return _in_words("".join(parts), "en")
    elif language == "ko" and korean_words:
        return read_korean(text)
    else:
        return text  # the LLM reads digits in these languages
    return _in_words(text, language) if _FOR_GRAMMAR.search(text) else text


def _in_words(text: str, language: Language) -> str:
    """Return `text` as words, surrounding whitespace kept."""
    core = text.strip()
    if not is_speakable(core) or (language in _PLAIN and _PLAIN[language].fullmatch(core)):
        return text
    for attempt in dict.fromkeys((core, _TOUCHING.sub(" ", core))):
        try:
            words = _grammar(language).normalize(attempt)
        except Exception as error:  # usually an assertion of the package; its errors are not documented
            logger.info("the %s grammar cannot read %r: %s", language, attempt[:80], error or type(error).__name__)
        else:
            if is_speakable(words):
                return text.replace(core, words)
    if language == "en" and len(parts := _ADDRESS.split(text)) > 1 and not _ADDRESS.fullmatch(core):
        return "".join(_in_words(part, language) for part in parts)
    return text


@cache
def _grammar(language: Language) -> Any:
    """Return the package's normalizer. Imported here, because most models of the server process no text."""
    from wetext import Normalizer

    return Normalizer(lang=language, operator="tn")
