"""What each rule of reading is for: takes one away after the other, and counts the cases that are read otherwise.

    python -m tests.text.needed_rules           prints the rules, words and rows of the tables that no case needs
    python -m tests.text.needed_rules --all     prints the cases of each

A rule is a pattern with what is said, a list of words of one meaning, or a row of the table of units and currencies.
"""

import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest.mock import patch

from cosyvoice_triton.text import chinese_reading, english_reading, frontend, japanese_reading, korean_reading, units
from cosyvoice_triton.text.quantities import Reader

from tests.text.test_reading import cases, read, stack_of

MODULES = {"zh": chinese_reading, "en": english_reading, "ja": japanese_reading, "ko": korean_reading}
Read = Callable[[str], str]


def sentences() -> dict[str, dict[str, str]]:
    """Return what the reader of each language is given for the cases, and the case of each."""
    given: dict[str, dict[str, str]] = {language: {} for language in MODULES}
    for case in cases():

        def seen(sentence: str, language: str, *rest: Any, name: str = case["id"]) -> str:
            if language in given:
                given[language].setdefault(sentence, name)
            return sentence

        with patch.object(frontend, "normalized", seen):
            read(case["text"], stack_of(case))
    return given


def finished(language: str, said: str) -> str:
    return chinese_reading.cleaned(said) if language == "zh" else said


def contexts(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the name of each list of words of a module, and an empty one; the patterns are of other words."""
    for name, value in vars(module).items():
        if name.startswith("_") and isinstance(value, frozenset | tuple) and value:
            yield name, type(value)()
        elif name.startswith("_") and isinstance(value, re.Pattern):
            yield name, re.compile("(?!)")


def without(language: str) -> Iterator[tuple[str, Read]]:
    """Yield the name of each rule of a language, and how it reads without it."""
    module, reader = MODULES[language], frontend._READERS[language]
    kind = type(reader)
    for name, nothing in contexts(module):
        with patch.object(module, name, nothing):
            yield name, reader.read
    for number, (has, rules) in enumerate(kind.rules):
        for each in rules:
            fewer = [*kind.rules]
            fewer[number] = (has, [rule for rule in rules if rule is not each])
            yield each[0], type(kind.__name__, (kind,), {"rules": fewer})().read


def rows() -> Iterator[tuple[str, Callable[[Reader], Reader]]]:
    """Yield the name of each unit and currency, and what makes a reader without it."""
    for table in (units.UNITS, units.CURRENCIES):
        for one in dict.fromkeys(unit.one for unit in table.values()):
            taken = {sign: table.pop(sign) for sign in [*table] if table[sign].one == one}
            yield one, lambda reader: type(reader)()
            table.update(taken)


def otherwise(read_now: Read, text: str, said: str) -> bool:
    try:
        return read_now(text) != said
    except KeyError:  # the sign of a currency that has no name now
        return True


def main() -> None:
    given = sentences()
    before = {
        language: {text: finished(language, frontend._READERS[language].read(text)) for text in texts}
        for language, texts in given.items()
    }
    needed: dict[str, set[str]] = {}

    def note(name: str, language: str, read_now: Read) -> None:
        changed = {
            given[language][text]
            for text, said in before[language].items()
            if otherwise(lambda each: finished(language, read_now(each)), text, said)
        }
        needed[name] = needed.get(name, set()) | changed

    for language in MODULES:
        for name, read_now in without(language):
            note(f"{language}: {name}", language, read_now)
    for sign, made in rows():
        for language in MODULES:
            note(f"unit {sign}", language, made(frontend._READERS[language]).read)
    for name, found in needed.items():
        if "--all" in sys.argv or not found:
            print(f"{name}: {' '.join(sorted(found)) or 'no case'}")
    print(f"{len(needed)} rules, {sum(not found for found in needed.values())} that no case needs")


if __name__ == "__main__":
    main()
