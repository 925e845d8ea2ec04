"""The ends of sentences and lines, closed after their numbers are words."""

import re
import unicodedata

from cosyvoice_triton.text.language import Language

_TAG_AT_END = re.compile(r"(?:\[[A-Za-zà-ǜ0-9_-]+\]|<[^<>]*>)\Z")
_CLOSERS = "\"'”’»›“」』】）)]}〉》"
_ENDS = ".!?。！？…．｡"
_CJK = re.compile(r"[\u3000-\u30ff\u3400-\u9fff\uff00-\uffef]")


def closed(sentence: str, language: Language | None) -> str:
    """Return the last sentence of a line, with a full stop of its script if it has no mark at its end, and a space
    after it. Chinese and Japanese have no space between sentences.

    Quotation marks, brackets and per cent signs are no marks, and end no sentence; a comma does not either, but it
    stays, and so does a tag of a sound.
    """
    sentence = sentence.rstrip()
    wide = is_wide(sentence, language)
    if not sentence:
        return sentence
    if is_open(sentence):
        sentence += "。" if wide else "."
    return sentence if wide else sentence + " "


def ended_as(written: str, spoken: str, language: Language | None) -> str:
    """Return `spoken` with the full stop that `written` ends with and that the grammar took for that of "p.m."."""
    body = spoken.rstrip()
    if not body or written.rstrip()[-1:] not in _ENDS or not is_open(body):
        return spoken
    return body + ("。" if is_wide(body, language) else ".") + spoken[len(body) :]


def is_wide(text: str, language: Language | None) -> bool:
    """Return whether a full stop of `text` is 。: it is Chinese or Japanese, or in their script."""
    return language in ("zh", "ja") or (language is None and bool(_CJK.search(text)))


def is_open(text: str) -> bool:
    """Return whether nothing says at the end of `text` that its sentence ends there."""
    if _TAG_AT_END.search(text):
        return False
    last = text.rstrip(_CLOSERS + " ")[-1:]
    return bool(last) and (unicodedata.category(last)[0] in "LNSM" or last in "%‰&@°")
