"""Numbers, dates, units and currencies as words, by WeTextProcessing's grammars for Chinese, English and Japanese.

The grammars are part of the package `wetext`, so nothing is downloaded.
"""

import logging
import re
from collections.abc import Collection
from functools import cache
from typing import Any, Literal

from cosyvoice_triton.text.cleaning import is_speakable

logger = logging.getLogger(__name__)

Language = Literal["zh", "en", "ja"]
Spelled = Literal["urls", "emails", "phones"]  # what a request can have left as it is

_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")
_KANA = re.compile(r"[\u3040-\u30ff]")
# Scripts without a grammar: English words for the numbers in a Korean sentence would be wrong.
_OTHER_SCRIPT = re.compile(r"[\u0370-\u03ff\u0400-\u052f\u0590-\u08ff\u0900-\u0fff\u1100-\u11ff\uac00-\ud7af]")

# Left unchanged: the LLM's tags of sounds ("[laughter]", "<strong>") and phonemes ("[AH0]", "[ǐ]"), characters that the
# package would escape (quotation marks, backslashes), and text that its grammar misreads ("1990s" as seconds, "2.0.1"
# as two decimals).
_AS_IS = r"""\[(?:[a-z_à-ǜ-]+|[A-Z]{1,2}[0-2]?)\]|</?[a-z]+>|["\\]|\b\d+0s\b|(?<!\d)\d+(?:\.\d+){2,}"""

# Full-width forms, which the grammars do not read as numbers. Other full-width punctuation is Chinese and stays.
_FULL_WIDTH = "０１２３４５６７８９ＡＢＣＤＥＦＧＨＩＪＫＬＭＮＯＰＱＲＳＴＵＶＷＸＹＺ％＄￥"
_HALF_WIDTH = str.maketrans(_FULL_WIDTH, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ%$¥")
_IN_NUMBER = re.compile(r"(?<=\d)[：．](?=\d)")

# The English grammar cannot read a number with a symbol on the wrong side: "#1", "100€".
_TOUCHING = re.compile(r"(?<=\d)(?=[^\w\s.,:])|(?<=[^\w\s.,:])(?=\d)")

# What requests can ask to have left unchanged, too.
_KINDS = {"urls": r"(?:https?://|www\.)[^\s<>\"]*[^\s<>\".,;:!?)\]']", "emails": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"}
_PROTOCOL = re.compile(r"\bhttps?://(?=\w)", re.IGNORECASE)

# The English grammar gives up on a sentence with such an address beside a comma or another address.
_ADDRESS = re.compile(r"((?:[\w-]+[.@/:])+[\w/?=&%#~-]*\w)", re.ASCII)

# Telephone numbers: with a country code, in American groups, or with a leading zero.
_PHONE = re.compile(
    r"(?<![\w.,-])(?:\+\d[\d ().-]{5,}\d|(?:\(\d{3}\) ?|\d{3}-)?[2-9]\d\d-\d{4}"
    r"|\(?0\d{1,4}\)?[ -]\d{3,}(?:[ -]\d{2,})*)(?![\w-])"
)
# Dollars and cents; not "$1.50 million", which is a decimal.
_PRICE = re.compile(
    r"([$€£])(\d{1,3}(?:,\d{3})+|\d+)\.(\d\d)(?![\d%]|\.\d| ?(?:[kmbt]n?|\w+illion|thousand)\b)", re.IGNORECASE
)
_HUNDREDTHS = {"$": ("cent", "cents"), "€": ("cent", "cents"), "£": ("penny", "pence")}

# Plain words that need no normalization: letters and clause punctuation, no full stop except the last.
_PLAIN = {
    "en": re.compile(r"[A-Za-z\s,;:?!'’“”()—–-]+\.?"),
    "zh": re.compile(r"[\u4e00-\u9fff\s，。、；：？！“”‘’（）…—]+"),
}


def language_of(text: str) -> Language | None:
    """Return the grammar for `text`, by its script; None if there is none. Text without letters counts as English."""
    if _KANA.search(text):
        return "ja"
    if _HAN.search(text):
        return "zh"
    return None if _OTHER_SCRIPT.search(text) else "en"


def half_width(text: str) -> str:
    """Return `text` with the full-width forms in numbers replaced: "３．５％" -> "3.5%"."""
    text = text.translate(_HALF_WIDTH)
    return _IN_NUMBER.sub(lambda match: {"：": ":", "．": "."}[match[0]], text)


def normalized(sentence: str, language: Language, as_is: Collection[Spelled] = ()) -> str:
    """Return `sentence` with its numbers and symbols as words, surrounding whitespace kept; unreadable parts and those
    in `as_is` stay unchanged.

    Anything but plain words takes about 0.1 ms per character and holds the GIL, so callers go sentence by sentence.
    """
    parts = _unchanged(frozenset(as_is)).split(sentence)  # every second part matched and stays unchanged
    if language == "en":
        parts[::2] = [_english(part, phones="phones" not in as_is) for part in parts[::2]]
    parts[::2] = [_in_words(part, language) for part in parts[::2]]
    return "".join(parts)


@cache
def _unchanged(as_is: frozenset[Spelled]) -> re.Pattern[str]:
    return re.compile("|".join([f"({_AS_IS}", *(_KINDS[kind] for kind in sorted(as_is & _KINDS.keys()))]) + ")")


def _english(text: str, phones: bool) -> str:
    """Return `text` in forms that the English grammar reads well: prices, telephone numbers, web addresses."""
    text = _PROTOCOL.sub("", _PRICE.sub(_price, text))
    return _PHONE.sub(_digit_by_digit, text) if phones else text


def _price(match: re.Match[str]) -> str:
    sign, whole, hundredths = match[1], match[2], int(match[3])
    small = f"{hundredths} {_HUNDREDTHS[sign][hundredths != 1]}"
    if not hundredths:
        return sign + whole
    return small if not int(whole.replace(",", "")) else f"{sign}{whole} and {small}"


def _digit_by_digit(match: re.Match[str]) -> str:
    plus = "plus " if match[0].startswith("+") else ""
    return plus + ", ".join(" ".join(group) for group in re.findall(r"\d+", match[0]))


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
