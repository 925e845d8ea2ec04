"""Quantities of a text, found in the same way for all languages, and said by a `Reader` for each.

A quantity is an amount with its sign, currency, scale and unit; a date, a clock time, a ratio, two numbers with a
slash, the groups of a code, the parts of a version, or digits that touch letters. Two of a kind with a dash between
them are a range.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from unicodedata import normalize

from cosyvoice_triton.text.tables import CURRENCIES, Words, counted, roman


class Around:
    """The text before and after a quantity: called with the name of a context, whether it is in that."""

    def __init__(self, words: Words, before: str, after: str) -> None:
        others = _PAIRS.match(after)  # share what is after the last one
        self.before, self.after = before, after[others.end() :] if others else after
        self._words, self._head = words, ""

    def __call__(self, name: str) -> bool:
        words, after, before = self._words.contexts[name]
        self._head = self._head or self._words.fillers.sub("", f" {self.before.lower()}".replace("(", " "))
        return self._head.endswith(words) or bool(after.match(self.after) or (before and before.search(self.before)))


class Quantity:
    """A quantity as it is written: its kind, its text, and the parts that its pattern names; "" for what is missing."""

    kind = text = number = sign = currency = minus = scale = unit = per = power = ""  # `minus`: after a currency
    year = month = day = of = hour = minute = second = half = whole = over = under = ""  # `of`: between day and month

    def __init__(self, kind: str, text: str = "", **parts: str) -> None:
        self.__dict__.update(parts, kind=kind, text=text)

    def but(self, **parts: str) -> "Quantity":
        """Return the quantity with other parts."""
        return Quantity(**{**self.__dict__, **parts})

    @property
    def digits(self) -> str:
        """Return the number of an amount without marks of thousands."""
        return self.number.translate(_MARKS)

    @property
    def groups(self) -> list[str]:
        """Return all numbers that are written."""
        return re.findall(r"\d+(?:\.\d+)?" if self.kind == "ratio" else r"\d+", self.text.replace(",", ""))

    @property
    def is_plain(self) -> bool:
        """Return whether it is a whole number and nothing else."""
        others = self.sign + self.currency + self.minus + self.scale + self.unit + self.per + self.power
        return self.kind == "amount" and self.number.isdigit() and not others

    @property
    def is_day(self) -> bool:
        """Return whether two numbers with a slash can be a month and a day."""
        is_short = (self.over + self.under).isdigit() and not self.whole + self.unit
        return is_short and 0 < int(self.over) < 13 and 0 < int(self.under) < 32

    def is_below(self, limit: int) -> bool:
        """Return whether it is a whole number below `limit`, of three digits at most."""
        return self.is_plain and len(self.number) < 4 and int(self.number) < limit


LONGEST = 15  # digits of what is read as a number; a longer one is read digit by digit
_MARKS = dict.fromkeys(map(ord, ",'’ "))  # of thousands
ORDINALS = ("st", "nd", "rd", "th")
_PAIRS = re.compile(r"(?:[,、，;]\s?\d+[-–:]\d+)+")
_PER = re.compile(r"/(\d*)\s?(.*)")
_LETTER = re.compile("[A-Za-z]")


class Reader:
    """Finds the quantities of texts in one language and says them.

    It has a method for each kind, which gets the quantity and what is around it. What the methods here need to say are
    words of `reading.txt`; a subclass has methods of its own where a language says more.
    """

    functions: Mapping[str, Callable[[str], object]] = {}  # by name, what else rules may say of what they found

    def __init__(self, language: str, whole: Callable[[int], str], digits: Sequence[str]) -> None:
        """`language`: the name of its column in the table of units, and of its words; `whole` says a number of at least
        0; `digits`: the words of 0 to 9."""
        self.language, self.whole, self.digits = language, lru_cache(maxsize=1024)(whole), digits
        said = {"digits": self.spelled, "number": self.number, "power": self.power, "to": lambda dash: self.say["to"]}
        self.words = Words(language, {**said, "roman": roman, **self.functions})
        self.say: dict[str, str] = defaultdict(str, self.words.tables["say"])
        named = ("needed", "dash", "addresses", "start", "money_end")
        self._patterns = {name: self.words.pattern(f"«{name}»") for name in named}

    def read(self, text: str) -> str:
        """Return `text` with its quantities, signs and addresses in words."""
        if not self._patterns["needed"].search(text):
            return text
        parts, end = list[str](), 0
        for found in self._patterns["addresses"].finditer(text) if "." in text else ():
            if said := self.address(found[0]):
                parts += [self._read(text[end : found.start()]), said]
                end = found.end()
        return "".join([*parts, self._read(text[end:])])

    def _read(self, text: str) -> str:
        text = self.words.first(text)
        parts, end, at = [""], 0, 0
        while found := self._patterns["start"].search(text, at):
            begin, before = found.start(), "".join(parts[-4:])[-40:] + text[end : found.start()]
            quantity, stop = self._quantity(text, begin)
            dash = self._patterns["dash"].match(text, stop)
            is_pair = dash and self._patterns["start"].match(text, dash.end())
            ranged = self._range(text, quantity, dash, before) if dash and is_pair else None
            words, stop = ranged or (self.said(quantity, before, text[stop : stop + 40]), stop)
            parts += [text[end:begin], words if any(map(str.isalnum, words)) else text[begin:stop]]
            end = at = stop
        return self.words.last("".join([*parts, text[end:]]))

    def address(self, written: str) -> str:
        """Return an address of the web or of mail as it is said; "" if it is none."""
        return written

    def number(self, digits: str) -> str:
        """Return the words of a whole or decimal number; of a very long one, and after a leading zero, its digits."""
        whole, _, decimals = digits.partition(".")
        is_spelled = len(whole) > LONGEST or (len(whole) > 1 and whole[0] == "0")
        words = self.spelled(whole) if is_spelled else self.whole(int(whole or 0))
        said = self.say["between"].join(map(self.whole, map(int, decimals)))
        return words + self.say["point"] * bool(said) + said

    def spelled(self, digits: str) -> str:
        """Return digits one by one."""
        return self.say["between"].join([self.digits[int(char)] for char in digits if char in "0123456789"])

    def said(self, it: Quantity, before: str, after: str) -> str:
        """Return the words of a quantity."""
        at = Around(self.words, before, after)
        if it.kind == "clock" and it.minute and not it.second + it.half and at("score"):
            it = Quantity("ratio", it.text.replace(":0", ":"))
        if it.kind in ("date", "code") and at("tally"):
            it = Quantity("code" if at("code") else "series", it.text)
        return str(getattr(self, it.kind, self.listed)(it, at))

    def sign(self, it: Quantity, at: Around) -> str:
        of_unit = it.sign and self.say[it.sign + ("°" if at("degrees") else it.unit[:1])]
        return of_unit or "".join(self.say[mark] for mark in it.sign + it.minus)

    def powered(self, it: Quantity) -> str:
        """Return a number and its exponent."""
        raised = self.say["raised"]
        return self.number(it.digits) + (raised + self.power(it.power).removeprefix(raised) if it.power else "")

    def power(self, power: str) -> str:
        """Return what is said of an exponent; "" if there is none."""
        said = self.number(normalize("NFKC", power).lstrip("-")) if power else ""
        named = self.words.tables["power"].get(power) or self.say["power"].format(self.say[power[:1]] + said)
        return named if said else ""

    def unit_of(self, it: Quantity) -> str:
        """Return the name of a unit or currency, and what it is per."""
        names = self.words.money.get(it.currency) or self.words.units.get(it.unit, "")
        joined = f"-{it.unit or it.currency}"  # "a 5-km run"
        is_one = (it.digits == "1" and not it.scale) or it.text.rstrip(".").endswith(joined)
        said = self.say["blank"] * bool(names) + counted(names, is_one)
        if it.per:
            count, unit = _PER.findall(it.per)[0]
            said += self.say["per"] + (self.number(count) + self.say["blank"] if count else "")
            said += self.words.tables["per"].get(unit) or counted(self.words.units.get(unit, unit), not count)
        return said

    def amount(self, it: Quantity, at: Around) -> str:
        if it.is_plain:
            return self.plain(it.digits, at)
        scale = self.say["blank"] * bool(it.scale) + it.scale
        return self.sign(it, at) + self.powered(it) + scale + self.unit_of(it)

    def plain(self, digits: str, at: Around) -> str:
        """Return a number that has nothing but its digits and the words around it."""
        return self.spelled(digits) if self.is_code(digits, at) else self.number(digits)

    def is_code(self, digits: str, at: Around) -> bool:
        """Return whether a number is said digit by digit because of what is around it."""
        if len(digits) > 6:
            return not at("counted")
        known = digits in self.words.tables["known"] or at("code") or (at("call") and len(digits) < 6)
        coded = at("coded") and not (len(digits) < 5 and digits.endswith("00"))
        return len(digits) > 2 and (known or coded) and not at("counted")

    def range(self, first: Quantity, last: Quantity, at: Around, dash: str) -> str:
        if first.is_plain and last.is_plain:
            falls = first.is_below(1000) and last.is_below(int(first.digits) + 1)
            kind = "numbered" if at("numbered") else "record" if at("record") or (falls and at("standing")) else "ratio"
            if falls or kind != "ratio" or at("score") or (dash in "-–" and at("won")):
                return self.listed(Quantity(kind, f"{first.number}:{last.number}"), at)
        if first.unit == last.unit and not first.sign and not self.unit_of(last).endswith("之"):
            first = first.but(unit="")
        said = self.said(first.but(currency=""), at.before, at.after).strip()
        return f"{said}{self.say['to']}{self.said(last, at.before * last.is_plain, at.after)}"

    def date(self, it: Quantity, at: Around) -> str:
        said = self.year(it.year) + self.say["year"] if it.year else ""
        said += self.whole(int(it.month)) + self.say["month"] if it.month else ""
        return said + (self.whole(int(it.day)) + self.say["day"] * (not at("day")) if it.day else "")

    def year(self, year: str) -> str:
        return self.number(year)

    def clock(self, it: Quantity, at: Around) -> str:
        said = self.say[it.half[:1].lower()] + self.hour(int(it.hour))
        seconds = self.number(it.second.lstrip("0")) + self.say["second"] if it.second.strip("0.") else ""
        zero = self.say["zero"] if it.minute[:1] == "0" else ""
        minutes = zero + self.whole(int(it.minute or 0)) + self.say["minute"]
        return said + (minutes if it.minute.strip("0") or seconds else "") + seconds

    def hour(self, hour: int) -> str:
        return self.whole(hour) + self.say["hour"]

    def length(self, it: Quantity, at: Around) -> str:
        """Return minutes and seconds that no clock shows, which look like a ratio."""
        is_ratio = at("score") or (self.say["hour"] and not at("timed")) or int(it.hour) + int(it.minute) == 100
        return self.listed(Quantity("ratio", it.text), at) if is_ratio else self.clock(it, at)

    def slash(self, it: Quantity, at: Around) -> str:
        if len(it.over) > 2 and at("code"):
            return self.code(it, at)
        if it.is_day and not (at("share") or at("list")):
            named = at("date") or it.under in self.words.tables["days"] or "0" in (it.over[0], it.under[0])
            if named or at("said_day"):  # slashes of a text are of one kind
                return self.date(Quantity("date", month=it.over, day=it.under), at)
        kind = "list" if it.under.isdigit() else "ratio"
        is_pressure = kind == "list" and 30 < int(it.under) < float(it.over)
        is_share = it.whole or (at("share") and not is_pressure) or (kind == "list" and float(it.over) < int(it.under))
        if self.say[kind] and (at("list") or not is_share):
            return self.listed(it.but(kind=kind), at) + self.unit_of(it)
        return self.fraction(it, at)

    def fraction(self, it: Quantity, at: Around) -> str:
        said = self.sign(it, at) + (self.number(it.whole) + self.say["and"] if it.whole else "")
        return said + self.number(it.under) + self.say["over"] + self.number(it.over) + self.unit_of(it)

    def code(self, it: Quantity, at: Around) -> str:
        return self.say["plus"] * (it.text[0] == "+") + self.say["group"].join(map(self.spelled, it.groups))

    def version(self, it: Quantity, at: Around) -> str:
        """Return the parts of a version or of an address of a network, whose long parts are said by their digits."""
        parts = [self.spelled(part) if len(part) > 2 else self.number(part) for part in it.groups]
        return self.say["point"].join(parts)

    def listed(self, it: Quantity, at: Around) -> str:
        """Return numbers with what is said between those of their kind: a ratio, a series or a name."""
        return self.say[it.kind].join(map(self.number, it.groups))

    def _quantity(self, text: str, begin: int, after_dash: bool = False) -> tuple[Quantity, int]:
        """Return the quantity that begins at `begin`, and where it ends."""
        for kind, pattern in self.words.kinds[after_dash:]:
            if found := pattern.match(text, begin):
                it, stop = Quantity(kind, found[0], **found.groupdict("")), found.end()
                break
        if _LETTER.match(text, stop) and (it.is_plain or it.kind == "version"):
            return Quantity("name", it.text), stop
        return it.but(currency=it.unit, unit="") if it.unit in CURRENCIES and not it.currency else it, stop

    def _range(self, text: str, first: Quantity, dash: re.Match[str], before: str) -> tuple[str, int] | None:
        """Return two quantities of a kind with a dash between them, said, and where they end; None if it is none."""
        last, end = self._quantity(text, dash.end(), after_dash=True)
        if (pair := _paired(first, last)) is None:
            return None
        if pair[1].currency and not last.currency and (written := self._patterns["money_end"].match(text, end)):
            end = written.end()
        at = Around(self.words, before, text[end : end + 40])
        first, last = pair
        if first.is_plain and last.is_plain and len(first.number) > 1:
            falls = len(first.number) == len(last.number) > 3 and last.number < first.number
            # Groups of a code.
            if last.number[0] == "0" != last.number or falls or at("code") or self.is_code(first.number, at):
                return self.code(Quantity("code", f"{first.number}-{last.number}"), at), end
        return self.range(first, last, at, dash[0].strip()), end


def _paired(first: Quantity, last: Quantity) -> tuple[Quantity, Quantity] | None:
    """Return two quantities of a range, each with what is written at the other one only; None if they are no pair."""
    if first.is_day and last.is_day:
        first, last = (Quantity("date", month=each.over, day=each.under) for each in (first, last))
    for kind, part, limit in (("date", "day", 32), ("clock", "hour", 25)):
        if first.kind == kind and last.is_below(limit):
            last = Quantity(kind, **{part: last.number})
        elif last.kind == kind and first.is_below(limit):
            first = Quantity(kind, of=last.of, **{part: first.number})
    units_differ = first.unit and last.unit and first.unit != last.unit
    only_last_ordinal = last.scale in ORDINALS and first.scale not in ORDINALS
    if units_differ or only_last_ordinal or first.kind != last.kind or first.kind not in ("amount", "date", "clock"):
        return None
    return first.but(unit=first.unit or last.unit), last.but(currency=last.currency or first.currency)
