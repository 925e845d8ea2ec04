"""Numbers, dates, units and currencies as words: by the rules of a language, then, in Chinese and Japanese, by
WeTextProcessing's grammar where the rules left a sign.

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

# What requests can ask to have left unchanged, too.
_PHONE = r"(?<![\w.,-])\+?\(?\d[\d ().-]{5,}\d(?![\w-])"
_KINDS = {
    "phones": _PHONE,
    "urls": r"(?:https?://|www\.)[^\s<>\"]*[^\s<>\".,;:!?)\]']",
    "emails": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
}
# 6'2" and 65" stand before the quotation marks that no rule sees.
_INCHES = re.compile(
    r"""(?<![\w.])(\d{1,2})['’′] ?(\d{1,2})(["”″]|'')?(?!\w)|(?<![\w"])(\d{1,3}(?:\.\d{1,2})?)["″](?=\s[A-Za-z])"""
)
_FOR_GRAMMAR = re.compile(r"[0-9$€£%&@+=<>℃℉°]")  # what the rules left


def normalized(sentence: str, language: Language, as_is: Collection[Spelled] = (), korean_words: bool = True) -> str:
    """Return `sentence` with its numbers and symbols as words, surrounding whitespace kept; unreadable parts and those
    in `as_is` stay unchanged.

    Where a grammar is needed it takes 10 ms and holds the GIL, so callers go sentence by sentence.
    """
    if language == "en":
        sentence = _INCHES.sub(_inches, sentence)
    parts = _unchanged(frozenset(as_is)).split(sentence)
    for index in range(0, len(parts), 2):  # every second part matched and stays unchanged
        parts[index] = _read(parts[index], language, korean_words)
    return "".join(parts)


def _inches(match: re.Match[str]) -> str:
    """Return feet and inches, and inches where the mark does not close a quotation."""
    if match[1]:
        return f"{match[1]} feet {match[2]}" + (" inches" if match[3] else "")
    return f"{match[4]} inch" if match.string.count('"') % 2 else match[0]


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
        return read_english(text)
    elif language == "ko" and korean_words:
        return read_korean(text)
    else:
        return text  # the LLM reads digits in these languages
    return _in_words(text, language) if _FOR_GRAMMAR.search(text) else text


def _in_words(text: str, language: Language) -> str:
    """Return `text` as words, surrounding whitespace kept."""
    core = text.strip()
    if not is_speakable(core):
        return text
    try:
        words = _grammar(language).normalize(core)
    except Exception as error:  # usually an assertion of the package; its errors are not documented
        logger.info("the %s grammar cannot read %r: %s", language, core[:80], error or type(error).__name__)
        return text
    return text.replace(core, words) if is_speakable(words) else text


@cache
def _grammar(language: Language) -> Any:
    """Return the package's normalizer. Imported here, because most models of the server process no text."""
    from wetext import Normalizer

    return Normalizer(lang=language, operator="tn")
