"""A small grammar of everyday English: statements, questions, exclamations, short answers, names and numbers."""

import random
import re
from configparser import ConfigParser
from pathlib import Path

_GRAMMAR = ConfigParser(delimiters=("=",), interpolation=None)
_GRAMMAR.read_string(Path(__file__).with_suffix(".ini").read_text(encoding="utf-8"))
KINDS = {kind: re.split(r",\s*", words) for kind, words in _GRAMMAR["kinds"].items()}
PATTERNS = {pattern: float(weight) for pattern, weight in _GRAMMAR["patterns"].items()}


def everyday_sentence(rng: random.Random, words: list[str]) -> str:
    """One sentence in lower case, numbers in digits. words: frequent words, for places where any word is possible."""

    def filled(pattern: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda found: of_kind(found[1]), pattern)

    def of_kind(kind: str) -> str:
        if kind == "number":
            return str(rng.choice((rng.randint(0, rng.choice((20, 100, 999, 9999))), rng.randint(1900, 2030))))
        if kind == "hour":
            return rng.choice(("a quarter past {0}", "half past {0}", "{0} o'clock", "{0} thirty", "{0}")).format(
                rng.randint(1, 12)
            )
        return rng.choice(words) if kind == "word" else filled(rng.choice(KINDS[kind]))

    sentence = filled(*rng.choices([*PATTERNS], [*PATTERNS.values()]))
    return sentence if sentence[-1] in "?!" else sentence + rng.choice("........!")
