"""Dictionaries of pronunciations: words of a text, and what is spoken in their place.

As text, a dictionary is a JSON object, or has one `word = reading` a line (or a tab in place of the `=`). A line that
starts with `#` is a comment.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_WORDS = 1000
MAX_CHARS = 200  # of a word and of a reading
MAX_FILE_BYTES = 4 * MAX_WORDS * 2 * MAX_CHARS  # of UTF-8
_LETTER = re.compile(r"[A-Za-z0-9\u00c0-\u024f\u0370-\u052f]")  # of scripts that have blanks between words
_SEPARATOR = re.compile(r"\t|=>?")


def pronunciations(given: Any, name: str = "pronunciation", max_words: int = MAX_WORDS) -> dict[str, str]:
    """Return a dictionary of words and readings, given as one or as text.

    ValueError that starts with `name` and says what is wrong with it. A word of small letters stands for its
    capitalized forms too.
    """
    if isinstance(given, str):
        given = _json(given, name) if given.lstrip().startswith(("{", "[")) else _lines(given, name)
    if not isinstance(given, Mapping):
        raise ValueError(f'{name} must be an object of words and readings such as {{"nginx": "engine x"}}')
    if len(given) > max_words:
        raise ValueError(f"{name} has {len(given)} words, more than the limit of {max_words}")
    for word, reading in given.items():
        if not isinstance(reading, str) or not reading.strip() or not word.strip():
            raise ValueError(f"{name} of {word[:40]!r} must be text, not {reading!r}")
        if max(len(word), len(reading)) > MAX_CHARS:
            raise ValueError(f"{name} of {word[:40]!r} is longer than {MAX_CHARS} characters")
    return {word.strip(): reading.strip() for word, reading in given.items()}


def read_pronunciations(path: Path) -> dict[str, str]:
    """Return the dictionary in a file. ValueError that names the file, and the line if one is wrong; OSError."""
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise ValueError(f"{path} has {size} bytes, more than the limit of {MAX_FILE_BYTES}")
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    return pronunciations(text, str(path))


def combined(*dictionaries: Mapping[str, str]) -> dict[str, str]:
    """Return all words. A dictionary has precedence over those after it, also for other forms of its words."""
    words: dict[str, str] = {}
    for more in dictionaries:
        words = {word: reading for word, reading in more.items() if word.lower() not in words} | words
    return words


class Pronouncer:
    """Puts the readings of a dictionary into texts, those of the longest words first, where they are not parts of
    longer words.

    A word of small letters stands for its other forms too ("nginx" for "Nginx" and "NGINX"); one with a capital letter
    only for itself. What was put in is not looked at again.
    """

    def __init__(self, words: Mapping[str, str]) -> None:
        self._words = words
        lengths: dict[str, set[int]] = {}
        for word in words:
            for first in {word[0], word[0].upper()}:
                lengths.setdefault(first, set()).add(len(word))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}  # of words so begun
        self._begins = re.compile(f"[{re.escape(''.join(lengths))}]") if lengths else None

    def __call__(self, text: str) -> str:
        """Return `text` with the readings. The time is linear in the text for any dictionary."""
        if self._begins is None:
            return text
        read, end = [], 0
        for begin in self._begins.finditer(text):
            start = begin.start()
            if start >= end and not _joined(text, start) and (word := self._longest(text, start)):
                read += [text[end:start], self._words.get(word) or self._words[word.lower()]]
                end = start + len(word)
        return "".join([*read, text[end:]])

    def _longest(self, text: str, start: int) -> str | None:
        for length in self._lengths.get(text[start], ()):
            word = text[start : start + length]
            if (word in self._words or word.lower() in self._words) and not _joined(text, start + length):
                return word
        return None


def _joined(text: str, place: int) -> bool:
    """Return whether the characters before and at `place` are letters of one word."""
    pair = text[max(place - 1, 0) : place + 1]
    return place > 0 and len(pair) == 2 and all(map(_LETTER.match, pair))


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from None


def _lines(text: str, name: str) -> dict[str, str]:
    words: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        word, *reading = _SEPARATOR.split(line, maxsplit=1)
        if not word.strip() or not "".join(reading).strip():
            raise ValueError(f"{name}, line {number}: {line.strip()[:80]!r} is not `word = reading`")
        words[word.strip()] = reading[0].strip()
    return words
