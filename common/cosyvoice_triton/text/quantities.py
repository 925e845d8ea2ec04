"""Quantities of a text, found in the same way for all languages, and said by a `Reader` for each.

A quantity is an amount with its sign, currency, scale and unit; a date, a clock time, a ratio, two numbers with a
slash, the groups of a code, the parts of a version, or digits that touch letters. Two of a kind with a dash between
them are a range.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple
from unicodedata import normalize

from cosyvoice_triton.text.numbers import is_spelled, roman
from cosyvoice_triton.text.tables import CURRENCIES, CURRENCY, UNITS, Words, one_of, shapes


class Around:
    """The text before and after a quantity: called with the name of a context, whether it is in that."""

    def __init__(self, words: Words, before: str, after: str) -> None:
        others = _PAIRS.match(after)  # share what is after the last one
        self.before, self.after = before, after[others.end() :] if others else after
        self._words, self._head = words, ""

    def __call__(self, name: str) -> bool:
        words, after = self._words.contexts[name]
        if words:
            self._head = self._head or self._words.fillers.sub("", f" {self.before.lower()}".replace("(", " "))
        return (bool(words) and self._head.endswith(words)) or bool(after.match(self.after))


class Quantity(NamedTuple):
    """A quantity as it is written. `parts`: of an amount its number; of a date year, month and day; of a clock time
    hour, minute, second and half of the day; of a slash the whole number, over and under; else the numbers. What is
    missing is ""."""

    kind: str
    parts: tuple[str, ...]
    sign: str = ""
    currency: str = ""
    scale: str = ""
    unit: str = ""
    per: str = ""
    power: str = ""

    @property
    def digits(self) -> str:
        """Return the number of an amount without marks of thousands."""
        return re.sub("[,'’ ]", "", self.parts[0])

    @property
    def is_plain(self) -> bool:
        """Return whether it is a whole number and nothing else."""
        return self == Quantity("amount", self.parts) and self.parts[0].isdigit()

    def is_below(self, limit: int) -> bool:
        """Return whether it is a whole number below `limit`, of three digits at most."""
        return self.is_plain and len(self.digits) < 4 and int(self.digits) < limit


def numbers(kind: str, *parts: str) -> Quantity:
    """Return a quantity of nothing but numbers."""
    return Quantity(kind, parts)


_FIELDS = {"date": ("year", "month", "day"), "clock": ("hour", "minute", "second", "half")}
_SLASH = re.compile(r"(?:(\d+)[ -])?(\d+(?:\.\d+)?)/(\d+)(?:ths|rds|nds)?(?![0-9_/]|\.\d)")
_NAME = re.compile(r"\d+(?:\.\d+)*")
_DIGITS = re.compile(r"\d+(?:\.\d+)?")
_SPLIT = re.compile(r"\d+"), _DIGITS
_DASH = re.compile(r"\s?(?:[~～〜]|[-–—]+)\s?")
_PAIRS = re.compile(r"(?:[,、，;]\s?\d+[-–:]\d+)+")
_PER = re.compile(r"(\d*)\s?/?(.*)")


class Reader:
    """Finds the quantities of texts in one language and says them.

    It has a method for each kind, which gets the quantity and what is around it. What the methods here need to say are
    words of `reading.txt`; a subclass has methods of its own where a language says more.
    """

    language = ""  # the name of its column in the table of units, and of its words
    whole: Callable[[int], str]  # says a number of at least 0
    spelled: Callable[[str], str]  # says digits one by one
    functions: Mapping[str, Callable[[str], object]] = {}  # by name, what else rules may say of what they found

    def __init__(self) -> None:
        names = {sign: str(name) for sign, unit in UNITS.items() if (name := getattr(unit, self.language))}
        self._names, self._money = names, {sign: str(getattr(unit, self.language)) for sign, unit in CURRENCIES.items()}
        functions = {"digits": self.spelled, "number": self.number, "unit": names.__getitem__, **self.functions}
        functions["roman"] = lambda letters: roman(normalize("NFKC", letters))
        self.words = Words(self.language, functions, shared="quantities")
        self.say = defaultdict(str, self.words.tables["say"])
        self.words.patterns |= {"units": one_of(names), "currency": CURRENCY}
        pattern = self.words.pattern
        self._needed, self._addresses = pattern("«needed»"), re.compile(self.words.patterns["addresses"], re.ASCII)
        self._unit, self._money_end, self._start = pattern("«unit»"), pattern("«money_end»"), pattern("«start»")
        self._of_amount, self._of_money = pattern("«amount»"), pattern("«money»")
        self._said_day = pattern("«said_day»")
        self._month_first, self._day_first = pattern("«month_first»"), pattern("«day_first»")

    def read(self, text: str) -> str:
        """Return `text` with its quantities, signs and addresses in words."""
        if not self._needed.search(text):
            return text
        parts, end = list[str](), 0
        for found in self._addresses.finditer(text):
            if said := self.address(found[0]):
                parts += [self._read(text[end : found.start()]), said]
                end = found.end()
        return "".join([*parts, self._read(text[end:])])

    def _read(self, text: str) -> str:
        text = self.words.first(text)
        parts, end, at = [""], 0, 0
        while found := self._start.search(text, at):
            begin = found.start()
            quantity, stop = self._quantity(text, found)
            if quantity.kind == "code" and text[begin - 1 : begin] == "(" and "(" not in text[begin:stop]:
                begin -= 1
            before = "".join(parts[-2:])[-40:] + text[end:begin]
            words, stop = self._range(text, quantity, stop, before) or (
                self.said(quantity, before, text[stop : stop + 40]),
                stop,
            )
            parts += [text[end:begin], words if any(map(str.isalnum, words)) else text[begin:stop]]
            end = at = stop
        return self.words.last("".join([*parts, text[end:]]))

    # --- what is said -------------------------------------------------------------------------------------------------

    def address(self, written: str) -> str:
        """Return an address of the web or of mail as it is said; "" if it is none."""
        return written

    def number(self, digits: str) -> str:
        """Return the words of a whole or decimal number; of a very long one, and after a leading zero, its digits."""
        whole, _, decimals = digits.partition(".")
        words = self.spelled(whole) if is_spelled(whole) else self.whole(int(whole or 0))
        return words + (self.say["point"] + self.decimals(decimals) if decimals else "")

    def decimals(self, digits: str) -> str:
        """Return the digits after a point."""
        return self.spelled(digits)

    def said(self, it: Quantity, before: str, after: str) -> str:
        """Return the words of a quantity."""
        at = Around(self.words, before, after)
        if it.kind == "clock" and not any(it.parts[2:]) and at("score"):
            it = numbers("ratio", it.parts[0], it.parts[1].lstrip("0") or "0")
        return str(getattr(self, it.kind)(it, at))

    def sign(self, it: Quantity, at: Around) -> str:
        below_zero = it.sign == "-" and (it.unit[:1] in tuple("°℃℉") or at("degrees"))
        return (below_zero and self.say["cold"]) or "".join(self.say[mark] for mark in it.sign)

    def powered(self, it: Quantity) -> str:
        """Return a number and its exponent."""
        power = self.words.tables["power"].get(it.power)
        if it.power and not power:
            minus = self.say["-"] if it.power[0] == "-" else ""
            power = self.say["power"].format(minus + self.number(it.power.lstrip("-")))
        return self.number(it.digits) + (self.say["raised"] + power if power else "")

    def unit_of(self, it: Quantity) -> str:
        """Return the name of a unit or currency, and what it is per."""
        name = self._money[it.currency] if it.currency else self._names.get(it.unit, "")
        if not it.per:
            return name
        count, unit = _PER.findall(it.per)[0]
        said = self.words.tables["per"].get(unit) or self._names.get(unit, unit)
        if count:
            said = self.number(count) + self.say["blank"] + said + self.say["many"]
        return name + self.say["per"] + said

    def amount(self, it: Quantity, at: Around) -> str:
        if it.is_plain:
            return self.plain(it.digits, at)
        words = self.sign(it, at) + self.powered(it), it.scale, self.unit_of(it)
        return self.say["blank"].join(filter(None, words))

    def plain(self, digits: str, at: Around) -> str:
        """Return a number that has nothing but its digits and the words around it."""
        return self.spelled(digits) if self.is_code(digits, at) else self.number(digits)

    def is_code(self, digits: str, at: Around) -> bool:
        """Return whether a number is said digit by digit because of what is around it."""
        if len(digits) > 6:
            return not at("counted")
        known = digits in self.words.tables["known"] or at("code") or (at("call") and len(digits) < 6)
        return len(digits) > 2 and known and not at("counted")

    def range(self, first: Quantity, last: Quantity, at: Around, dash: str) -> str:
        if first.is_plain and last.is_plain and not at("counted"):
            descends = first.is_below(1000) and last.is_below(int(first.digits))
            if descends or at("score") or (dash in "-–" and at("won")):
                return self.ratio(numbers("ratio", first.digits, last.digits), at)
        if first.unit == last.unit and not first.sign and not self.unit_of(last).endswith("之"):
            first = first._replace(unit="")
        if first.currency == last.currency:
            first = first._replace(currency="")
        after = at.after if first.is_plain and last.is_plain else ""
        return f"{self.said(first, at.before, after).strip()}{self.say['to']}{self.said(last, '', at.after)}"

    def date(self, it: Quantity, at: Around) -> str:
        year, month, day = it.parts
        said = (self.year(year) + self.say["year"] if year else "") + (self.month(int(month)) if month else "")
        return said + self.whole(int(day)) + self.say["day"] * (not at("day"))

    def year(self, year: str) -> str:
        return self.number(year)

    def month(self, month: int) -> str:
        return self.whole(month) + self.say["month"]

    def clock(self, it: Quantity, at: Around) -> str:
        hour, minute, second, half = it.parts
        said = self.say[half[:1].lower()] + self.hour(int(hour))
        said += self.whole(int(minute)) + self.say["minute"] if minute.strip("0") else ""
        return said + (self.number(second.lstrip("0")) + self.say["second"] if second.strip("0.") else "")

    def hour(self, hour: int) -> str:
        return self.whole(hour) + self.say["hour"]

    def ratio(self, it: Quantity, at: Around) -> str:
        return self.say["ratio"].join(map(self.number, it.parts))

    def slash(self, it: Quantity, at: Around) -> str:
        whole, over, under = it.parts
        if is_day(it) and not it.unit:
            named = at("date") or at("dated") or under in self.words.tables["days"]
            if named or self._said_day.search(at.before):  # slashes of a text are of one kind
                return self.date(numbers("date", "", over, under), at)
        return self.fraction(it)

    def fraction(self, it: Quantity) -> str:
        whole, over, under = it.parts
        said = self.number(whole) + self.say["and"] if whole else ""
        return said + self.number(under) + self.say["over"] + self.number(over) + self.unit_of(it)

    def code(self, it: Quantity, at: Around) -> str:
        return self.say["plus"] * (it.sign == "+") + self.say["group"].join(map(self.spelled, it.parts))

    def series(self, it: Quantity, at: Around) -> str:
        return self.say["group"].join(map(self.number, it.parts))

    def version(self, it: Quantity, at: Around) -> str:
        """Return the parts of a version or of an address of a network, whose long parts are said by their digits."""
        return self.say["point"].join(self.spelled(part) if len(part) > 2 else self.number(part) for part in it.parts)

    def name(self, it: Quantity, at: Around) -> str:
        return self.say["point"].join(map(self.number, it.digits.split(".")))

    # --- what is written ----------------------------------------------------------------------------------------------

    def _range(self, text: str, first: Quantity, stop: int, before: str) -> tuple[str, int] | None:
        """Return two quantities of a kind with a dash between them, said, and where they end; None if it is none."""
        dash = _DASH.match(text, stop)
        found = dash and self._start.match(text, dash.end())
        if not dash or not found or first.kind not in ("amount", "date", "clock", "slash"):
            return None
        last, end = self._quantity(text, found, after_dash=True)
        after = text[end : end + 40]
        pair = _paired(first, last)
        if pair is None or re.match(r"\s?=", after) or (_DASH.match(text, end) and after[1:2].isdigit()):
            return None
        if pair[1].currency and not last.currency and (written := self._money_end.match(text, end)):
            end = written.end()
        at = Around(self.words, before, text[end : end + 40])
        if self._is_groups(*pair, at):
            return self.code(numbers("code", pair[0].digits, pair[1].digits), at), end
        return self.range(*pair, at, dash[0].strip()), end

    def _is_groups(self, first: Quantity, last: Quantity, at: Around) -> bool:
        """Return whether two numbers are groups of a code: not a range if the last one is smaller or begins with 0."""
        if not (first.is_plain and last.is_plain) or len(first.digits) < 2:
            return False
        descending = len(first.digits) == len(last.digits) > 3 and last.digits < first.digits
        return last.digits[0] == "0" != last.digits or descending or at("code")

    def _quantity(self, text: str, found: re.Match[str], after_dash: bool = False) -> tuple[Quantity, int]:
        """Return the quantity that begins at `found`, and where it ends."""
        at = found.end()
        if text[at : at + 1] == " " and (named := self._month_first.match(text, found.start())):
            return numbers("date", named[3] or "", named[1], named[2]), named.end()
        sign = (found["sign"] or "") + (found["minus"] or "")
        currency = found["currency"] or ""
        if not sign and not currency and at and text[at] != ".":
            joined = at > 1 and text[at - 1] in "-_" and text[at - 2].isascii() and text[at - 2].isalnum()
            if _is_letter(text[at - 1]) or (joined and not after_dash):
                name = _NAME.findall(text, at)[0]
                return numbers("name", name), at + len(name)
        if not currency and (shaped := self._shaped(text, at, sign)):
            return shaped
        amount = (self._of_money if currency else self._of_amount).match(text, at)
        assert amount
        unit, stop = (amount["unit"] or "").replace("° ", "°"), amount.end()
        per = "" if amount["per"] is amount["each"] else amount["per"] or amount["each"] or "/"
        if unit in CURRENCIES and not currency:
            unit, currency = "", unit
        scale, power = amount["scale"] or "", amount["power"] or ""
        if amount["number"].isdigit() and not unit + currency + sign + scale and _is_letter(text[stop : stop + 1]):
            return numbers("name", amount["number"]), stop
        return Quantity("amount", (amount["number"],), sign, currency, scale, unit, per, power), stop

    def _shaped(self, text: str, at: int, sign: str) -> tuple[Quantity, int] | None:
        """Return what is known by its shape, whatever is around it."""
        begin = _DIGITS.match(text, at)
        if begin is None:
            return None
        after = text[begin.end() : begin.end() + 1]
        for follows, signs, kind, shape in shapes():
            if after in follows and signs in ("*", sign or "0") and (found := shape.match(text, at)):
                parts = _SPLIT[kind == "ratio"].findall(found[0])
                if kind in _FIELDS:
                    parts = [(found[name] or "").lstrip(":") for name in _FIELDS[kind]]
                return Quantity(kind, tuple(parts), sign if kind == "code" else ""), found.end()
        if after == "/" or text[begin.end() + 1 : begin.end() + 2].isdigit():
            return self._slash(text, at, sign)
        if day := self._day_first.match(text, at):
            return Quantity("date", (day[3] or "", day[2], day[1]), unit="of"), day.end()
        return None

    def _slash(self, text: str, at: int, sign: str) -> tuple[Quantity, int] | None:
        slash = _SLASH.match(text, at)
        unit = slash and self._unit.match(text, slash.end())
        if slash is None or (unit is None and _is_letter(text[slash.end() : slash.end() + 1])):
            return None
        parts = (slash[1] or "", slash[2], slash[3])
        return Quantity("slash", parts, sign, unit=unit["unit"] if unit else ""), (unit or slash).end()


def _paired(first: Quantity, last: Quantity) -> tuple[Quantity, Quantity] | None:
    """Return two quantities of a range, each with what is written at the other one only; None if they are no pair."""
    if first.kind == last.kind == "slash" and is_day(first) and is_day(last):
        return numbers("date", "", *first.parts[1:]), numbers("date", "", *last.parts[1:])
    if first.kind == "date" and last.is_below(32):
        return first, numbers("date", "", "", last.digits)
    if last.kind == "date" and first.is_below(32):
        return numbers("date", "", "", first.digits), last
    if first.kind == "clock" and last.is_below(25):
        return first, numbers("clock", last.digits, "", "", "")
    if last.kind == "clock" and first.is_below(25):
        return numbers("clock", first.digits, "", "", ""), last
    if first.kind != last.kind or first.kind == "slash" or (first.unit and last.unit and first.unit != last.unit):
        return None
    return first._replace(unit=first.unit or last.unit), last._replace(currency=last.currency or first.currency)


def is_day(slash: Quantity) -> bool:
    """Return whether two numbers with a slash can be a month and a day."""
    whole, month, day = slash.parts
    return not whole and month.isdigit() and 0 < int(month) < 13 and 0 < int(day) < 32


def _is_letter(char: str) -> bool:
    return char.isascii() and char.isalpha()
