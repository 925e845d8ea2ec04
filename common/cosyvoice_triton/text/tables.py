"""What `reading.txt` says: one table of units and currencies for all languages; words, contexts and rules of each."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from unicodedata import normalize

_SECTIONS = defaultdict[str, list[str]](list)  # rows by section
for _row in Path(__file__).with_name("reading.txt").read_text("utf-8").splitlines():
    if _row.startswith("[") and _row.endswith("]"):
        _rows = _SECTIONS[_row[1:-1]]
    elif _row and not _row.startswith("# "):
        _rows.append(_row)

Names = dict[str, str]  # by language, and "cent": a hundredth of a currency in English; a language may have none


def _table(section: str) -> Iterator[tuple[str, Names]]:
    """Yield signs and their names, which may have others before their own: "kilo" of "meter"."""
    for row in re.split(" ; |\n", "\n".join(_SECTIONS[section])):
        written, *names = row.split("|")
        signs, _, prefixes = written.partition(":")
        own = dict(zip(("en", "zh", "ja", "ko", "cent"), names, strict=False))
        for sign in signs.strip("!").split():
            if signs[0] != "!":
                yield sign.replace("_", " "), own
            yield from ((prefix + sign, _joined(prefix, own)) for prefix in prefixes.split())


def _joined(prefix: str, names: Names) -> Names:
    return {language: name and _PREFIXES[prefix][language] + name for language, name in names.items()}


_PREFIXES = dict(_table("prefixes"))
CURRENCIES, UNITS = dict(_table("currencies")), dict(_table("units"))
UNITS |= {sign + raised: _joined(raised, UNITS[sign]) for sign in ("km", "cm", "mm", "m") for raised in "2²3³"}


def roman(letters: str) -> int:
    """Return the value of a Roman numeral, which may be one character."""
    values = [{"I": 1, "V": 5, "X": 10, "L": 50}[letter] for letter in normalize("NFKC", letters)]
    return sum(-value if value < max(values[index:]) else value for index, value in enumerate(values))


def counted(names: str, one: bool = False) -> str:
    """Return the name of one or of many, of English names as `reading.txt` has them."""
    single, _, many = names.partition("/")
    return (single if one else many or single).replace("*", "" if one else "s")


def one_of(signs: Iterable[str]) -> str:
    """Return a pattern of any of `signs`, the longest first."""
    return "|".join(re.escape(sign) for sign in sorted(signs, key=len, reverse=True))


ROMAN = r"(?=[IVXL])(?:XL|L?X{0,3})(?:IX|IV|V?I{0,3})"  # a pattern
_SPOKEN = re.compile(r"«([\w ]*)(\d)»|\\(\d)")  # what a rule says of a part that it found
_NAMED = re.compile(r"(?m)^(\w+)([=<>:^]) (.*)")
# Words that end what is before a quantity, a pattern that begins what is after it, one that ends what is before it.
Context = tuple[tuple[str, ...], re.Pattern[str], re.Pattern[str] | None]


class Words:
    """The words and rules of one language. `functions`: by name, what rules may say of what they found."""

    def __init__(self, language: str, functions: Mapping[str, Callable[[str], object]]) -> None:
        self.tables = defaultdict[str, dict[str, str]](dict)
        self.units, self.money = (
            {sign: names[language] for sign, names in table.items() if names.get(language)}
            for table in (UNITS, CURRENCIES)
        )
        self.patterns = {"roman": ROMAN, "units": one_of(self.units), "currency": one_of(CURRENCIES)}
        self.patterns["money"] = one_of({*self.money.values()})
        before = defaultdict[str, list[str]](list)
        rows = _NAMED.findall("\n".join(_SECTIONS["quantities"] + _SECTIONS[language]))
        for name, kind, words in rows:
            if kind == ":":
                pairs = (pair.rpartition("=") for pair in words.split())
                self.tables[name] |= {word or said: said.replace("_", " ") for word, _, said in pairs}
            elif kind == "<":  # words of letters are whole words
                before[name] += [" " * (language == "en") + word.replace("_", " ") for word in words.split()]
            else:
                name += kind * (kind == "^")
                more = kind == ">" and name in self.patterns
                self.patterns[name] = f"{self.patterns[name]}|{words}" if more else words
        self.contexts = defaultdict[str, Context](lambda: ((), re.compile("(?!)"), None))
        for name in (name for name, kind, _ in rows if kind in "<>^"):
            ended = self.pattern(rf"(?:«{name}^»)\Z") if f"{name}^" in self.patterns else None
            self.contexts[name] = tuple(before[name]), self.pattern(rf"\s?(?:«{name}»)"), ended
        self.fillers = self.pattern("«fillers»")
        self.tables["unit"] = self.units
        self._functions = {name: partial(self._word, name) for name in self.tables} | dict(functions)
        kinds = (row.partition(" ") for row in _SECTIONS["kinds"])
        self.kinds = [(kind, self.pattern(shape)) for kind, _, shape in kinds]  # of quantities
        self.first = self._rules("every first", f"{language} first")
        self.last = self._rules("every last", f"{language} last")
        self.clean = self._rules(f"{language} clean")

    def pattern(self, written: str) -> re.Pattern[str]:
        """Return a pattern, in which «name» is another pattern, or any word of a table; nothing if there is none."""

        def named(found: re.Match[str]) -> str:
            if found[1] in self.patterns:
                return self.pattern(self.patterns[found[1]]).pattern
            words = self.tables.get(found[1], ())
            return one_of({form for word in words for form in (word, word[:1].upper() + word[1:])}) or "(?!)"

        return re.compile(re.sub("«(.*?)»", named, written.replace("␣", " ")))

    def _word(self, table: str, word: str) -> str:
        """Return what a table says of a word, which may have a capital that the table has not."""
        words = self.tables[table]
        return words.get(word, words.get(word[:1].lower() + word[1:], "").capitalize() or word)

    def _rules(self, *sections: str) -> Callable[[str], str]:
        """Return what applies the rules of sections in their order; those after a "?" only to a text that has it."""
        groups = list[tuple[re.Pattern[str], list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]]]]()
        for row in chain(*(["? ", *_SECTIONS[section]] for section in sections)):
            pattern, mark, said = row.partition(" ⇒ ")
            if mark:
                said = said.replace("␣", " ")
                groups[-1][1].append((self.pattern(pattern), partial(self._said, said) if "«" in said else said))
            else:
                groups.append((self.pattern(row[2:]), []))

        def apply(text: str) -> str:
            for has, rules in groups:
                if has.search(text):
                    for rule, said in rules:
                        text = rule.sub(said, text)
            return text

        return apply

    def _said(self, said: str, found: re.Match[str]) -> str:
        def word(part: re.Match[str]) -> str:
            value = found[int(part[2] or part[3])] or ""
            for name in reversed((part[1] or "").split()):
                value = str(self._functions[name](value))
            return value

        return _SPOKEN.sub(word, said)
