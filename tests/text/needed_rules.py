"""What each rule of reading is for: takes one away after the other, and counts the cases that are read otherwise.

    python -m tests.text.needed_rules           prints the rows of `reading.txt` that no case needs
    python -m tests.text.needed_rules --all     prints the cases of each

A row is a rule, words of a context or a table, or a unit or currency; of a row with several units each is one.
"""

import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from cosyvoice_triton.text import frontend, tables
from cosyvoice_triton.text.quantities import Reader

from tests.text.test_reading import cases, read, stack_of

LANGUAGES = ("zh", "en", "ja", "ko")


def sentences() -> dict[str, dict[str, str]]:
    """Return what the reader of each language is given for the cases, and the case of each."""
    given: dict[str, dict[str, str]] = {language: {} for language in LANGUAGES}
    for case in cases():

        def seen(sentence: str, language: str, name: str = case["id"], **rest: Any) -> str:
            if language in given:
                given[language].setdefault(sentence, name)
            return sentence

        with patch.object(frontend, "normalized", seen):
            read(case["text"], stack_of(case))
    return given


def said(reader: Reader, text: str) -> str:
    try:
        return reader.words.clean(reader.read(text))
    except KeyError:  # the sign of a currency that has no name now
        return ""


def again(language: str) -> Reader:
    reader = frontend._READERS[language]
    return type(reader)(language, reader.whole, reader.digits)


def without() -> Iterator[tuple[str, list[Reader]]]:
    """Yield the name of each row, and readers that have all but it."""
    for section, rows in [*tables._SECTIONS.items()]:
        for row in rows:
            if row.startswith("? ") or section[:2] not in LANGUAGES:
                continue
            kept = [each for each in rows if each is not row]
            with patch.dict(tables._SECTIONS, {section: kept}):
                try:
                    yield f"{section}: {row}", [again(section[:2])]
                except (KeyError, re.error):  # other rows use its name, or are its pattern's other half
                    yield f"{section}: {row}", []
    for table in (tables.UNITS, tables.CURRENCIES):
        for one in dict.fromkeys(unit["en"] for unit in table.values()):
            taken = {sign: table.pop(sign) for sign in [*table] if table[sign]["en"] == one}
            yield f"unit {one}", [*map(again, LANGUAGES)]
            table.update(taken)


def main() -> None:
    given = sentences()
    before = {
        language: {text: said(frontend._READERS[language], text) for text in given[language]} for language in LANGUAGES
    }
    rows = unneeded = 0
    for name, readers in without():
        needed = {
            given[reader.language][text]
            for reader in readers
            for text, words in before[reader.language].items()
            if said(reader, text) != words
        }
        rows, unneeded = rows + 1, unneeded + (not needed and bool(readers))
        if "--all" in sys.argv or (readers and not needed):
            print(f"{name[:100]}: {' '.join(sorted(needed)) or 'no case' if readers else 'used by others'}")
    print(f"{rows} rows, {unneeded} that no case needs")


if __name__ == "__main__":
    main()
