"""Dictionaries of pronunciations: words of a text, and what is spoken in their place.

As text, a dictionary is a JSON object, or has one `word = reading` a line (or a tab in place of the `=`). A line that
starts with `#` is a comment.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import regex

MAX_WORDS = 1000
MAX_WORD_CHARS, MAX_READING_CHARS = 64, 200
MAX_FILE_BYTES = 2 << 20
_LETTER = r"[A-Za-z0-9\u00c0-\u024f\u0370-\u052f]"  # of scripts that have blanks between words
_EDGE = rf"(?:(?<!{_LETTER})|(?!{_LETTER}))"
_SEPARATOR = re.compile(r"\t|=>?")


def pronunciations(given: Any, name: str = "pronunciation", max_words: int = MAX_WORDS) -> dict[str, str]:
    """Return a dictionary of words and readings, given as one or as text.

    ValueError that starts with `name` and says what is wrong with it. A word of small letters stands for its
    capitalized forms too.
    """
    if isinstance(given, str):
        if not given.strip():
            return {}
        try:
            given = json.loads(given) if given.lstrip().startswith(("{", "[")) else _lines(given, name)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{name} is not JSON: {error}") from None
    if not isinstance(given, Mapping):
        raise ValueError(f'{name} must be an object of words and readings such as {{"nginx": "engine x"}}')
    if len(given) > max_words:
        raise ValueError(f"{name} has {len(given)} words, more than the limit of {max_words}")
    for word, reading in given.items():
        if not isinstance(reading, str) or not reading.strip() or not word.strip():
            raise ValueError(f"{name} of {word[:40]!r} must be text, not {reading!r}")
        if len(word) > MAX_WORD_CHARS or len(reading) > MAX_READING_CHARS:
            raise ValueError(
                f"{name} of {word[:40]!r} has {len(word)} characters for the word and {len(reading)} for the reading, "
                f"more than {MAX_WORD_CHARS} or {MAX_READING_CHARS}"
            )
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
    for more in filter(None, dictionaries):
        words = {word: reading for word, reading in more.items() if word.lower() not in words} | words
    return words


class Pronouncer:
    """Puts the readings of a dictionary into texts, those of the longest words first, where they are not parts of
    longer words.

    A word of small letters stands for its other forms too ("nginx" for "Nginx" and "NGINX"); one with a capital letter
    only for itself. What was put in is not looked at again.
    """

    def __init__(self, words: Mapping[str, str]) -> None:
        small = {word: reading for word, reading in words.items() if word == word.lower()}
        self._words = {word.casefold(): reading for word, reading in small.items()} | dict(words)
        listed = rf"{_EDGE}(?:\L<words>|(?i:\L<small>)){_EDGE}"
        self._pattern = regex.compile(listed, words=list(words), small=list(small))

    def __call__(self, text: str) -> str:
        """Return `text` with the readings. The time is linear in the text for any dictionary."""
        return self._pattern.sub(self._reading, text)

    def _reading(self, found: regex.Match[str]) -> str:
        # The pattern takes a dotted capital I for an i, and is wrong: such a word stays.
        return self._words.get(found[0]) or self._words.get(found[0].casefold(), found[0])


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
