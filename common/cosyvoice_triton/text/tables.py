"""What `reading.txt` says: one table of units and currencies for all languages; words, contexts and rules of each."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from cosyvoice_triton.text.numbers import ROMAN


def _sections() -> dict[str, list[str]]:
    """Return the rows of the file by section."""
    found: dict[str, list[str]] = {}
    rows: list[str] = []
    for row in Path(__file__).with_name("reading.txt").read_text("utf-8").splitlines():
        if row.startswith("[") and row.endswith("]"):
            rows = found.setdefault(row[1:-1], [])
        elif row and not row.startswith("# "):
            rows.append(row)
    return found


_SECTIONS = _sections()


class Unit(NamedTuple):
    """The names of a unit; "" in a language that leaves its letters as they are."""

    en: str
    many: str
    zh: str = ""
    ja: str = ""
    ko: str = ""
    cent: str = ""  # a hundredth of a currency, in English

    def named(self, *names: str) -> "Unit":
        """Return the unit with names before its own, English first: "kilo" of "meter"."""
        return Unit(*(own and more + own for more, own in zip((names[0], *names), self, strict=False)))


def _rows(section: str) -> Iterable[tuple[list[str], str]]:
    for row in re.split(" ; |\n", "\n".join(_SECTIONS[section])):
        signs, _, names = row.partition("|")
        yield signs.split(), names


def _unit(names: str) -> Unit:
    english, *others = names.split("|")
    one, _, many = english.partition("/")
    return Unit(one, many or f"{one}s", *others)


def _units() -> dict[str, Unit]:
    prefixes = {sign: names.split("|") for signs, names in _rows("prefixes") for sign in signs}
    found = dict[str, Unit]()
    for written, names in _rows("units"):
        signs, _, before = " ".join(written).partition(":")
        unit = _unit(names)
        for sign in signs.replace("!", "").split():
            if signs[0] != "!":
                found[sign.replace("_", " ")] = unit
            found |= {prefix + sign: unit.named(*prefixes[prefix]) for prefix in before.split()}
    found |= {"km": found["km"]._replace(zh="公里"), "kg": found["kg"]._replace(zh="公斤")}
    for sign in ("km", "cm", "mm", "m", "ft"):
        found |= dict.fromkeys((sign + "2", sign + "²"), found[sign].named("square ", "平方", "平方", "제곱"))
        found |= dict.fromkeys((sign + "3", sign + "³"), found[sign].named("cubic ", "立方", "立方", "세제곱"))
    return found


UNITS = _units()
CURRENCIES = {sign: _unit(names) for signs, names in _rows("currencies") for sign in signs}


def one_of(signs: Iterable[str]) -> str:
    """Return a pattern of any of `signs`, the longest first."""
    return "|".join(re.escape(sign) for sign in sorted(signs, key=len, reverse=True))


_SPOKEN = re.compile(r"«([\w ]*)(\d)»|\\(\d)")  # what a rule says of a part that it found
CURRENCY = one_of(CURRENCIES)
Context = tuple[tuple[str, ...], re.Pattern[str]]  # words that stand before it, and what comes after


class Words:
    """The words and rules of one language. `functions`: by name, what rules may say of what they found;
    `shared`: a section whose words are theirs, too, unless they have their own."""

    def __init__(self, language: str, functions: Mapping[str, Callable[[str], object]], shared: str = "") -> None:
        self.tables = defaultdict[str, dict[str, str]](dict)
        self.patterns = {"roman": ROMAN}
        before, after = defaultdict[str, list[str]](list), dict[str, str]()
        for name, kind, words in re.findall(
            r"(?m)^(\w+)([=<>:]) (.*)", "\n".join([*_SECTIONS.get(shared, ()), *_SECTIONS.get(language, ())])
        ):
            if kind == "=":
                self.patterns[name] = words
            elif kind == ":":
                pairs = (pair.rpartition("=") for pair in words.split())
                self.tables[name] |= {word or said: said.replace("_", " ") for word, _, said in pairs}
            elif kind == "<":  # words of letters are whole words
                before[name] += [" " * (language == "en") + word.replace("_", " ") for word in words.split()]
            else:
                after[name] = f"{after[name]}|{words}" if name in after else words
        self.contexts = defaultdict[str, Context](lambda: ((), re.compile("(?!)")))
        for name in {**before, **after}:
            self.contexts[name] = tuple(before[name]), re.compile(rf"\s?(?:{after.get(name, '(?!)')})")
        self.patterns = after | self.patterns
        self.fillers = re.compile(self.patterns.get("fillers", r"\s+\Z"))
        self._functions = {**{name: self._word(name) for name in self.tables}, **functions}
        self.first = self._rules(f"{language} first", "every first")
        self.last = self._rules("every last", f"{language} last")
        self.clean = self._rules(f"{language} clean")

    def pattern(self, written: str) -> re.Pattern[str]:
        """Return a pattern, in which «name» is any word of a table, or another pattern."""

        def named(found: re.Match[str]) -> str:
            if found[1] in self.patterns:
                return self.pattern(self.patterns[found[1]]).pattern
            words = sorted(self.tables.get(found[1], ()), key=len, reverse=True)
            either = (rf"[{word[0].upper()}{word[0]}]{word[1:]}" if word[0].islower() else word for word in words)
            return "|".join(either) or "(?!)"

        return re.compile(re.sub("«(.*?)»", named, written.replace("␣", " ")))

    def kinds(self) -> list[tuple[str, re.Pattern[str]]]:
        """Return the kinds of quantities and their patterns in this language."""
        rows = (row.partition(" ") for row in _SECTIONS["kinds"])
        return [(kind, self.pattern(shape)) for kind, _, shape in rows]

    def _word(self, name: str) -> Callable[[str], str]:
        """Return what looks up a word of a table, which may have a capital that the table has not."""
        table = self.tables[name]
        return lambda word: table.get(word, table.get(word[:1].lower() + word[1:], "").capitalize() or word)

    def _rules(self, *sections: str) -> Callable[[str], str]:
        """Return what applies the rules of sections in their order; of a group only to a text that has its "?"."""
        groups: list[tuple[re.Pattern[str], list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]]]] = []
        for row in chain(*(_SECTIONS.get(section, ()) for section in sections)):
            pattern, mark, said = row.partition(" ⇒ ")
            if mark:
                groups[-1][1].append((self.pattern(pattern), self._said(said.replace("␣", " "))))
            else:
                groups.append((self.pattern(row[2:]), []))

        def apply(text: str) -> str:
            for has, rules in groups:
                if has.search(text):
                    for rule, said in rules:
                        text = rule.sub(said, text)
            return text

        return apply

    def _said(self, said: str) -> str | Callable[[re.Match[str]], str]:
        if "«" not in said:
            return said

        def word(part: re.Match[str], found: re.Match[str]) -> str:
            value = found[int(part[2] or part[3])] or ""
            for name in reversed((part[1] or "").split()):
                value = str(self._functions[name](value))
            return value

        return lambda found: _SPOKEN.sub(lambda part: word(part, found), said)
