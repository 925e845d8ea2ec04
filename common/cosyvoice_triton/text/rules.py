"""Rules of reading: patterns, and what is said for them."""

import re
from collections.abc import Callable

Rule = tuple[str, Callable[[re.Match[str]], str] | str]
Group = tuple[str, list[Rule]]  # a pattern that every text has in which one of the rules could match; the rules


def reader(*groups: Group) -> Callable[[str], str]:
    """Return a function that applies all rules in order. A group whose sign is missing costs one look: most sentences
    have one kind of number, and there are many kinds."""
    compiled = [
        (re.compile(sign).search, [(re.compile(rule).sub, said) for rule, said in rules]) for sign, rules in groups
    ]

    def read(text: str) -> str:
        for has_sign, rules in compiled:
            if has_sign(text):
                for replaced, said in rules:
                    text = replaced(said, text)
        return text

    return read
