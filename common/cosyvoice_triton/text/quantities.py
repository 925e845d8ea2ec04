"""Quantities of a text, found in the same way for all languages, and said by a `Reader` for each.

A quantity is an amount with its sign, currency, scale and unit; a date, a clock time, a ratio, two numbers with a
slash, the groups of a code, the parts of a version, or digits that touch letters. Two of a kind with a dash between
them are a range.
"""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple
from unicodedata import normalize

from cosyvoice_triton.text.numbers import is_spelled, roman
from cosyvoice_triton.text.tables import CURRENCIES, CURRENCY, UNITS, Context, Words, one_of


class Around:
    """The text before and after a quantity: called with the name of a context, whether it is in that."""

    def __init__(self, before: str, after: str, contexts: Mapping[str, Context], fillers: re.Pattern[str]) -> None:
        self.before, self.after = before, after
        self._contexts, self._fillers, self._head = contexts, fillers, ""

    def __call__(self, name: str) -> bool:
        words, after = self._contexts.get(name, ((), None))
        if words and not self._head:
            self._head = self._fillers.sub("", f" {self.before.lower()}".replace("(", " ")) or " "
        return (
            self._head.endswith(words)
            if words and self._head.endswith(words)
            else bool(after and after.match(self.after))
        )


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


def _code(found: re.Match[str]) -> Quantity:
    return Quantity(
        "code", ("+",) * (found.string[found.start() - 1 : found.start()] == "+") + tuple(re.findall(r"\d+", found[0]))
    )


def _date(found: re.Match[str]) -> Quantity | None:
    """Return a date with its year last: with the month first, unless it is none, or full stops are between."""
    month, day = (found[1], found[3]) if int(found[1]) < 13 and found[2] != "." else (found[3], found[1])
    return Quantity("date", (found[4], month, day)) if 0 < int(month) < 13 and 0 < int(day) < 32 else None


# What a quantity is by its shape: what may follow its first number, a pattern, and what it makes of a match.
_Shape = tuple[str | tuple[str, ...], re.Pattern[str], Callable[[re.Match[str]], Quantity | None]]
_HALF = r"\s?([ap]\.?\s?m)(?![A-Za-z])"
_SIGNED: tuple[_Shape, ...] = (
    ("-/.", re.compile(r"(\d{4})([-/.])(1[0-2]|0?[1-9])\2(3[01]|[12]\d|0?[1-9])(?![-/.]?\d(?!\d{3}[-/.]))日?"),
     lambda found: Quantity("date", (found[1], found[3], found[4]))),
    ("-/.", re.compile(r"(\d{1,2})([-/.])(\d{1,2})\2((?:1[5-9]|20)\d\d|(?<=/)\d\d)(?![-/]?\d|\.\d)"), _date),
    (":", re.compile(rf"([01]?\d|2[0-4]):([0-5]\d)(?::([0-5]\d(?:\.\d+)?)|(?<=:\d\d)(\.\d+))?(?![:\d])(?:{_HALF})?", re.I),
     lambda found: Quantity("clock", (found[1], found[2], found[3] or found[4] or "", found[5] or ""))),
    (":", re.compile(r"(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)(?![:\d])"), lambda found: Quantity("ratio", (found[1], found[2]))),
    (".", re.compile(r"\d+(?:\.\d+){2,}(?!\d)"), lambda found: Quantity("version", tuple(found[0].split(".")))),
    (" apAP", re.compile(rf"(1[0-2]|0?[1-9]){_HALF}", re.I), lambda found: Quantity("clock", (found[1], "", "", found[2]))),
)  # fmt: skip
_SHAPES: tuple[_Shape, ...] = (
    *_SIGNED[:2],
    ("-. )*", re.compile(
        r"(?:(?:1[-. ])?\d{3}(?:[-. ]|\) ?)\d{3}[-. ]\d{4}|[2-9]\d\d-\d{4}|0\d{1,4}(?:[ -]|\) ?)\d{3,}(?:[ -]\d{2,})*"
        r"|1[3-9]\d[- ]?\d{4}[- ]?\d{4}|\d{1,12}(?:-\d{1,12}){2,9}|\d+(?:\*{2,}\d+)+|\d{3,4}(?: \d{3,4}){2,})(?![A-Za-z0-9_]|[-.]\d)"
    ), _code),
    *_SIGNED[2:],
)  # fmt: skip
_ABROAD: tuple[_Shape, ...] = ((" -", re.compile(r"\d{1,3}(?:[ -]?\(?\d{1,5}\)?){2,}(?!\d)"), _code), *_SIGNED)
_SLASH = re.compile(r"(?:(\d+)[ -])?(\d+(?:\.\d+)?)/(\d+)(?:ths|rds|nds)?(?![0-9_/]|\.\d)")
_NAME = re.compile(r"\d+(?:\.\d+)*")
_DIGITS = re.compile(r"\d+(?:\.\d+)?")
_NUMBER = r"(?P<number>(?:\d{1,3}(?:[,'’]\d{3})+(?![,'’]?\d)|[1-9]\d?(?: 000)+(?!\d)|\d+)(?:\.\d+(?!\.?\d))?|\.\d+)"
_DEGREES = r"°\s?[CF](?![A-Za-z])|[°℃℉]"
_SIGN = rf"(?P<sign>(?<![A-Za-z0-9_)\]%°.])[-+±~≈])?(?:(?P<currency>(?<![A-Za-z])(?:{CURRENCY}))\s?(?P<minus>-)?)?"
_DASH = re.compile(r"\s?(?:[~～〜]|[-–—]+)\s?")
_DAY = r"(3[01]|[12]\d|0?[1-9])(?:st|nd|rd|th)?"


class Reader:
    """Finds the quantities of texts in one language and says them.

    It has a method for each kind, which gets the quantity and what is around it. What the methods here need to say are a
    language's words; a subclass has these, and methods of its own where a language says more.
    """

    language = ""  # the name of its column in the table of units, and of its words
    # What is written, as patterns.
    needed = r"\d"  # of texts in which there is something to read
    addresses = "(?!)"
    months = scales = money_scales = "(?!)"  # after a number
    per_word = plain_per_word = "(?!)"  # after a slash, beside units; and where nothing but digits is before it
    fillers = r"\s+\Z"  # between a word of a context and a quantity
    gap = r"\s?"  # between a number and its unit
    unit_end = money_end = ""  # after a unit, and an amount with a currency; not said
    parted = frozenset[int]()  # what is no day after a slash; the others above 12 are
    # What is said.
    whole: Callable[[int], str]  # a number of at least 0
    spelled: Callable[[str], str]  # digits one by one
    signs: Mapping[str, str] = {}
    halves: Mapping[str, str] = {}  # of the day, by "a" and "p"
    point = to = ratio_to = over = mixed = grouped = per = ""  # between two numbers, before a unit
    year = month = day = hour = minute = second = degree = ""  # after a number
    power = "{}"

    def __init__(self) -> None:
        unit_names = {sign: str(name) for sign, unit in UNITS.items() if (name := getattr(unit, self.language))}
        self._names, self._money = (
            unit_names,
            {sign: str(getattr(unit, self.language)) for sign, unit in CURRENCIES.items()},
        )
        says = {
            "number": lambda digits: self.number(str(digits)),
            "digits": self.spelled,
            "roman": lambda letters: roman(normalize("NFKC", letters)),
        }
        self.words = Words(self.language, {**says, "unit": unit_names.__getitem__, **self.functions()})
        self._needed, self._addresses = re.compile(self.needed), re.compile(self.addresses, re.ASCII)
        self._fillers = re.compile(self.words.patterns.get("fillers", self.fillers))
        self.months = self.words.pattern(self.months).pattern
        units, per, end = one_of(unit_names), self.per_word, r"(?![A-Za-z0-9²³°])"
        unit = rf"(?={self.gap}[A-Za-zµμΩ°℃℉%％‰$€£¥￥₹₩₽¢]){self.gap}(?P<unit>{_DEGREES}|[%％‰]|(?:{CURRENCY})(?![A-Za-z\d])|(?:{units}){end}){self.unit_end}"
        self._unit = re.compile(unit)

        def amount(scales: str, each: str) -> str:
            tail = rf"(?:{unit}(?:/(?P<per>\d{{0,4}}\s?(?:(?:{units}){end}|{per})))?|(?<=\d)/(?P<each>{each}))?"
            return rf"{_NUMBER}(?:\^(?P<power>-?\d{{1,3}}))?(?:\s?(?P<scale>{scales}))?{tail}"

        self._of_amount = re.compile(amount(self.scales, self.plain_per_word))
        self._of_money = re.compile(amount(f"{self.scales}|{self.money_scales}", per) + self.money_end)
        self._money_end = re.compile(self.money_end)
        month_day = rf"{_DAY}(?![\d:]|[.,]\d|\s?[%°])"
        self._start = re.compile(
            rf"(?=[-+±~≈$€£¥￥₹₩₽¢A-Z\d.])(?:{_SIGN}(?=\d|(?<![\w.])\.\d)|\b(?:{self.months})\b\.?(?= {month_day}))"
        )
        self._month_first = re.compile(rf"({self.months})\b\.? {month_day}(?:,? (\d{{4}})(?!\d))?")
        year = r"(?:(?:,? |-)(\d{4}|(?<=-)\d\d)(?!\d))?"
        self._day_first = re.compile(rf"{_DAY}(?: of)?[ -]({self.months})(?![a-z]){year}")

    def functions(self) -> dict[str, Callable[[str], object]]:
        """Return what rules may say beside the words of tables."""
        return {}

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
        while at < len(text) and (found := self._start.search(text, at)):
            begin = found.start()
            quantity, stop = self._quantity(text, found)
            if quantity.kind == "code" and text[begin - 1 : begin] == "(" and "(" not in text[begin:stop]:
                begin -= 1
            before = "".join(parts[-2:])[-40:] + text[end:begin]
            words, stop = self._range(text, quantity, stop, before) or (self.said(quantity, before, text, stop), stop)
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
        return words + (self.point + self.decimals(decimals) if decimals else "")

    def decimals(self, digits: str) -> str:
        """Return the digits after a point."""
        return self.spelled(digits)

    def said(self, it: Quantity, before: str, after: str, stop: int = 0) -> str:
        """Return the words of a quantity before `stop` of the text `after`."""
        return self.say(it, Around(before, after[stop : stop + 40], self.words.contexts, self._fillers))

    def say(self, it: Quantity, at: Around) -> str:
        return str(getattr(self, it.kind)(it, at))

    def sign(self, it: Quantity) -> str:
        return "".join(self.signs[mark] for mark in it.sign)

    def powered(self, it: Quantity) -> str:
        """Return a number and its exponent."""
        if not it.power:
            return self.number(it.digits)
        if (word := self.words.tables.get("power", {}).get(it.power)) is not None:
            return self.number(it.digits) + self.power_of.format(word)
        minus = self.signs["-"] if it.power[:1] == "-" else ""
        return self.number(it.digits) + self.power.format(minus + self.number(it.power.lstrip("-")))

    power_of = "{}"  # a power that has a name

    def unit_of(self, it: Quantity) -> str:
        """Return the name of a unit or currency, and what it is per."""
        name = self._money[it.currency] if it.currency else self._names.get(it.unit, self.degree if it.unit else "")
        if not it.per:
            return name
        count, unit = re.fullmatch(r"(\d*)\s?/?(.*)", it.per).groups()  # type: ignore[union-attr]  # matches all
        return f"{name}{self.per}{self.number(count) if count else ''}{self._names.get(unit, unit)}"

    def amount(self, it: Quantity, at: Around) -> str:
        if it.is_plain:
            return self.plain(it.digits, at)
        return self.sign(it) + self.powered(it) + it.scale + self.unit_of(it)

    def plain(self, digits: str, at: Around) -> str:
        """Return a number that has nothing but its digits and the words around it."""
        return self.spelled(digits) if self.is_code(digits, at) else self.number(digits)

    def is_code(self, digits: str, at: Around) -> bool:
        """Return whether a number is said digit by digit because of what is around it."""
        contexts, counted = self.words.contexts, at("counted")
        known = contexts.get("known", ((), None))[1]
        if len(digits) > 6 or (not counted and known and known.match(digits)):
            return True
        return len(digits) > 2 and not counted and (at("code") or (at("call") and len(digits) < 6))

    def range(self, first: Quantity, last: Quantity, at: Around, dash: str) -> str:
        if first.is_plain and last.is_plain and not at("counted") and (at("score") or (dash in "-–" and at("won"))):
            return self.ratio(Quantity("ratio", (first.digits, last.digits)), at)
        if first.unit == last.unit and not first.sign:
            first = first._replace(unit="")
        if first.currency == last.currency:
            first = first._replace(currency="")
        return f"{self.said(first, at.before, '').strip()}{self.to}{self.said(last, '', at.after)}"

    def date(self, it: Quantity, at: Around) -> str:
        year, month, day = it.parts
        said = (self.number(year) + self.year if year else "") + (self.whole(int(month)) + self.month if month else "")
        return said + self.whole(int(day)) + ("" if at.after.startswith(self.day.strip()) else self.day)

    def clock(self, it: Quantity, at: Around) -> str:
        hour, minute, second, half = it.parts
        said = self.halves.get(half[:1].lower(), "") + self.whole(int(hour)) + self.hour
        said += self.whole(int(minute)) + self.minute if minute.strip("0") else ""
        return said + (self.number(second.lstrip("0")) + self.second if second.strip("0.") else "")

    def ratio(self, it: Quantity, at: Around) -> str:
        return self.ratio_to.join(map(self.number, it.parts))

    def slash(self, it: Quantity, at: Around) -> str:
        whole, over, under = it.parts
        if is_day(it) and not it.unit and (at("date") or (int(under) > 12 and int(under) not in self.parted)):
            return self.date(Quantity("date", ("", over, under)), at)
        return self.fraction(it)

    def fraction(self, it: Quantity) -> str:
        whole, over, under = it.parts
        said = self.number(whole) + self.mixed if whole else ""
        return said + self.number(under) + self.over + self.number(over) + self.unit_of(it)

    def code(self, it: Quantity, at: Around) -> str:
        return self.grouped.join(self.spelled(part) for part in it.parts if part != "+")

    def version(self, it: Quantity, at: Around) -> str:
        """Return the parts of a version or of an address of a network, whose long parts are said by their digits."""
        return self.point.join(self.spelled(part) if len(part) > 2 else self.number(part) for part in it.parts)

    def name(self, it: Quantity, at: Around) -> str:
        return self.point.join(map(self.number, it.digits.split(".")))

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
        at = Around(before, text[end : end + 40], self.words.contexts, self._fillers)
        if pair[0].is_plain and pair[1].is_plain and len(pair[1].digits) > 1 and pair[1].digits[0] == "0":
            return self.code(Quantity("code", (pair[0].digits, pair[1].digits)), at), end
        return self.range(*pair, at, dash[0].strip()), end

    def _quantity(self, text: str, found: re.Match[str], after_dash: bool = False) -> tuple[Quantity, int]:
        """Return the quantity that begins at `found`, and where it ends."""
        at = found.end()
        if text[at : at + 1] == " " and (named := self._month_first.match(text, found.start())):
            return Quantity("date", (named[3] or "", named[1], named[2])), named.end()
        sign = (found["sign"] or "") + (found["minus"] or "")
        currency = found["currency"] or ""
        if not sign and not currency and at and text[at] != ".":
            joined = at > 1 and text[at - 1] in "-_" and text[at - 2].isascii() and text[at - 2].isalnum()
            if _is_letter(text[at - 1]) or (joined and not after_dash):
                name = _NAME.match(text, at)
                assert name
                return Quantity("name", (name[0],)), name.end()
        if not currency and (shaped := self._shaped(text, at, sign)):
            return shaped
        amount = (self._of_money if currency else self._of_amount).match(text, at)
        assert amount
        unit, stop = amount["unit"] or "", amount.end()
        per = "" if amount["per"] is amount["each"] else amount["per"] or amount["each"] or "/"
        if unit in CURRENCIES and not currency:
            unit, currency = "", unit
        elif (
            amount["number"].isdigit()
            and not unit + sign + (amount["scale"] or "")
            and _is_letter(text[stop : stop + 1])
        ):
            return Quantity("name", (amount["number"],)), stop
        scale, power = amount["scale"] or "", amount["power"] or ""
        return Quantity("amount", (amount["number"],), sign, currency, scale, unit, per, power), stop

    def _shaped(self, text: str, at: int, sign: str) -> tuple[Quantity, int] | None:
        """Return what is known by its shape, whatever is around it."""
        begin = _DIGITS.match(text, at)
        if begin is None:
            return None
        after = text[begin.end() : begin.end() + 1]
        for follows, shape, made in _ABROAD if sign == "+" else _SIGNED if sign else _SHAPES:
            if after in follows and (found := shape.match(text, at)) and (quantity := made(found)):
                return quantity, found.end()
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
    kinds = first.kind, last.kind
    if kinds == ("slash", "slash"):
        dates = [Quantity("date", ("", *each.parts[1:])) for each in (first, last) if is_day(each)]
        return (dates[0], dates[1]) if len(dates) == 2 else None
    if kinds == ("date", "amount") and last.is_plain and 0 < int(last.digits) < 32:
        return first, Quantity("date", ("", "", last.digits))
    if kinds == ("amount", "date") and first.is_plain and 0 < int(first.digits) < 32:
        return Quantity("date", ("", "", first.digits)), last
    if kinds == ("amount", "clock") and first.is_plain and int(first.digits) < 25:
        return Quantity("clock", (first.digits, "", "", "")), last
    if kinds[0] != kinds[1] or (first.unit and last.unit and first.unit != last.unit):
        return None
    if kinds[0] == "amount":
        first = first._replace(unit=first.unit or last.unit)
        last = last._replace(currency=last.currency or first.currency)
    return first, last


def is_day(slash: Quantity) -> bool:
    """Return whether two numbers with a slash can be a month and a day."""
    whole, month, day = slash.parts
    return not whole and month.isdigit() and 0 < int(month) < 13 and 0 < int(day) < 32


def _is_letter(char: str) -> bool:
    return char.isascii() and char.isalpha()
