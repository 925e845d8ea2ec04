"""A dictionary of pronunciations: words of a text, and what is spoken in their place."""

import json
import re
from collections.abc import Mapping
from typing import Any

MAX_WORDS = 1000
MAX_CHARS = 200  # of a word and of a reading
_LETTER = re.compile(r"[A-Za-z0-9\u00c0-\u024f\u0370-\u052f]")  # of scripts that have blanks between words


def pronunciations(given: Any, name: str = "pronunciation") -> dict[str, str]:
    """Return a dictionary of words and readings, given as one or as JSON text.

    ValueError naming what is wrong with it. A word of small letters stands for its capitalized forms too.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else {}
        except ValueError as error:
            raise ValueError(f"{name} is not JSON: {error}") from None
    if not isinstance(given, Mapping):
        raise ValueError(f'{name} must be an object of words and readings such as {{"nginx": "engine x"}}')
    if len(given) > MAX_WORDS:
        raise ValueError(f"{name} has {len(given)} words, more than the limit of {MAX_WORDS}")
    for word, reading in given.items():
        if not isinstance(reading, str) or not reading.strip() or not word.strip():
            raise ValueError(f"{name} of {word!r} must be text, not {reading!r}")
        if max(len(word), len(reading)) > MAX_CHARS:
            raise ValueError(f"{name} of {word[:40]!r} is longer than {MAX_CHARS} characters")
    return {word.strip(): reading.strip() for word, reading in given.items()}


def pronounced(text: str, words: Mapping[str, str]) -> str:
    """Return `text` with the readings of `words`, the longest first, where they are not parts of longer words.

    A word of small letters stands for its other forms too ("nginx" for "Nginx" and "NGINX"); one with a capital letter
    only for itself. What was put in is not looked at again. The time is linear in the text for any dictionary.
    """
    if not words:
        return text
    exact = dict(words)
    lower = {word: reading for word, reading in words.items() if word == word.lower()}
    longest_first = sorted(exact, key=len, reverse=True)
    alternatives = "|".join(_bounded(word) for word in longest_first)

    def reading(match: re.Match[str]) -> str:
        found = match[0]
        return exact.get(found) or lower.get(found.lower()) or found

    return re.sub(alternatives, reading, text, flags=re.IGNORECASE)


def _bounded(word: str) -> str:
    letter = _LETTER.pattern
    before = rf"(?<!{letter})" if _LETTER.match(word[0]) else ""
    after = rf"(?!{letter})" if _LETTER.match(word[-1]) else ""
    return f"{before}{re.escape(word)}{after}"
