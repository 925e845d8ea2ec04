"""English: how quantities are said, and the words around a number that say what it is."""

import re

from cosyvoice_triton.text.english_words import ADDRESS, MONTH, MONTHS, RULES, address, named
from cosyvoice_triton.text.numbers import english, english_digits, english_ordinal, english_year
from cosyvoice_triton.text.quantities import Quantity, Reader, is_day
from cosyvoice_triton.text.units import CURRENCIES, UNITS

# Words before a number that is said digit by digit; fillers between them are skipped.
_CODES = frozenset(
    "code pin password passcode otp id cvv cvc number numbers ext extension invoice ticket account order serial reference "
    "policy booking confirmation member customer tracking phone telephone digits postcode agent ending ending_in ends_in".split()
)
_CALLS = frozenset("call calls calling called dial dials dialing dialed phone ring text".split())
# Of a few digits, with "oh" for a zero; and where a letter after the number is no unit.
_PLACES = frozenset(
    "room rooms flight suite route bus train highway interstate channel unit gate apartment locker seat boeing airbus "
    "porsche peugeot ferrari nokia levi's".split()
)
_SEATS = _PLACES | {"row", "platform", "section", "exit", "apt", "flat", "block"}
_DATES = frozenset(
    "on by until till before after from since due starting monday tuesday wednesday thursday friday saturday sunday mon "
    "tue tues wed thu thur thurs fri sat sun".split()
)
_PARTS = (20, 24, 25, 30)  # that things are divided into, and that are days of a month as well
_ERAS = frozenset("the early late mid in his her my their our your".split())  # before a decade
_FILLERS = frozenset(f"is was are : = # or and {english_digits('0123456789')}".split())
_NO_CODES = frozenset("AD BC CE AM PM TV UP".split())  # two capitals before a number that is one
_AFTER_CODE = re.compile(r"\b([A-Z]{2}|I) \Z")
_WORD = re.compile(r"[A-Za-z][A-Za-z'’]*|[:=#]|[^\sA-Za-z.,]")
_COUNTED = re.compile(
    r"\s+(?:(?:more|other|new|different|of)\s+)?(?!(?:was|is|has|his|its|this|as|us|vs|thus|plus|versus|yes|always|perhaps"
    r"|besides|unless)\b)(?:[a-z]+(?<!s)s\b|people|men|women|children)"
)
_SCALES = {
    "k": "thousand",
    "m": "million",
    "mn": "million",
    "b": "billion",
    "bn": "billion",
    "t": "trillion",
    "tn": "trillion",
}
_MONTH_NAMES = list(dict.fromkeys(MONTHS.values()))


class English(Reader):
    """Reads English."""

    language = "one"
    whole, spelled = staticmethod(english), staticmethod(english_digits)
    needed = r"[\d.&@=#%$€£+IVXL<>≥≤≈π√™©®§°~^×÷±/_]|\b[A-Z][a-z]{2}\b"
    addresses, rules, months = ADDRESS, RULES, MONTH
    scales = (
        r"(?:thousand|million|billion|trillion)\b|(?<=\d)(?:(?:st|nd|rd|th)(?![A-Za-z])|['’]?s(?![\w/])|[kKM](?![A-Za-z])"
        r"|x(?!\w|\s?(?:[-+=*/^²]|plus|minus|equals|squared|cubed)))"
    )
    money_scales = r"[kKmMbBtT]n?\b"
    per_word = r"[a-z]{2,12}(?![A-Za-z])"
    plain_per_word = r"(?:day|week|month|year|hour|night|person)\b"
    gap = "[ -]?"
    unit_end = r"(?:\.(?=,|\s[a-z(]))?"
    signs = {"-": "minus ", "+": "plus ", "±": "plus or minus ", "~": "about ", "≈": "about "}
    point, to, ratio_to, grouped, per = " point ", " to ", " to ", ", ", " per "

    def address(self, written: str) -> str:
        return address(written)

    def named(self, text: str) -> str:
        return named(text)

    def powered(self, it: Quantity) -> str:
        minus = "minus " if it.power[:1] == "-" else ""
        power = f" to the power of {minus}{self.number(it.power.lstrip('-'))}" if it.power else ""
        return self.number(it.digits) + {"2": " squared", "3": " cubed"}.get(it.power, power)

    def unit_of(self, it: Quantity) -> str:
        if it.unit[:1] in tuple("°℃℉"):
            scale = {"C": " Celsius", "℃": " Celsius", "F": " Fahrenheit", "℉": " Fahrenheit"}.get(it.unit[-1], "")
            return f" degree{'' if it.digits == '1' else 's'}{scale}"
        unit = UNITS.get(it.unit) or CURRENCIES.get(it.currency)
        name = f" {unit.one if it.digits == '1' and not it.scale else unit.many}" if unit else ""
        return name + super().unit_of(it._replace(unit="")).removeprefix(self._money.get(it.currency, ""))

    def amount(self, it: Quantity, before: str, after: str) -> str:
        scale, head = it.scale, _heads(before)[:1]
        if len(it.unit) == 1 and it.unit.isupper() and (set(head) & _SEATS or re.match(r"\. [A-Z\d]", after)):
            return f"{self.number(it.digits)} {it.unit}"
        if scale[:1] in ("'", "’", "s") and scale != "st":
            decade = (
                it.digits.isdigit()
                and len(it.digits) in (2, 4)
                and it.digits[-1] == "0"
                and (len(it.digits) == 2 or _is_year(it.digits))
            )
            if decade and (scale != "s" or len(it.digits) == 4 or before[-1:] in "'’" or set(head) & _ERAS):
                return _decade(it.digits)
            it, scale = it._replace(unit="s", scale=""), ""
        if scale in ("st", "nd", "rd", "th"):
            return english_ordinal(int(it.digits)) if it.digits.isdigit() else self.number(it.digits) + scale
        if scale == "x":
            return f"{self.number(it.digits)} times"
        if it.currency and not scale:
            return self.sign(it) + self._paid(it)
        if scale == "K" and _is_name(it.digits, after):
            return f"{self.number(it.digits)} K"
        if it._replace(per="").is_plain:
            return self._plain(it.digits, before, after) + self.unit_of(it)
        digits = it.digits.rstrip("0").rstrip(".") if it.currency and "." in it.digits else it.digits
        scale = f" {_SCALES.get(scale.lower(), scale)}" if scale else ""
        return self.sign(it) + self.powered(it._replace(parts=(digits,))) + scale + self.unit_of(it)

    def _paid(self, it: Quantity) -> str:
        one, many, *_, cent = CURRENCIES[it.currency]
        whole, _, decimals = it.digits.partition(".")
        per = self.unit_of(it._replace(currency=""))
        if not cent or len(decimals) != 2:
            return f"{self.number(it.digits)} {one if it.digits == '1' else many}{per}"
        small, _, pence = cent.partition("/")
        cents = f"{english(int(decimals))} {small if int(decimals) == 1 else pence or small + 's'}"
        paid = f"{self.number(whole)} {one if whole == '1' else many}"
        return (paid if not int(decimals) else f"{paid} and {cents}" if int(whole or 0) else cents) + per

    def _plain(self, digits: str, before: str, after: str) -> str:
        """Return a number that has nothing but its digits and the words around it."""
        heads, counted = _heads(before), bool(_COUNTED.match(after))
        if len(digits) > 2:
            named = {*heads[:1], "_".join(heads[1::-1])}
            if (not counted and (named & _CODES or (named & _CALLS and len(digits) < 5))) or digits == "911":
                return english_digits(digits)
            if (coded := _AFTER_CODE.search(before)) and coded[1] not in _NO_CODES and len(digits) < 6:
                return english_digits(digits, "oh" if len(coded[1]) == 1 else "zero")
            if named & _PLACES and len(digits) < 5:
                return english_digits(digits, "oh")
        if before.endswith("number ") and len(digits) > 3:
            return english_digits(digits)
        if _is_year(digits) and not (counted and int(digits) % 100):
            return english_year(int(digits))
        return english_digits(digits) if len(digits) > 6 else self.number(digits)

    def range(self, first: Quantity, last: Quantity, before: str, after: str, dash: str) -> str:
        if last.unit == "of" and not first.parts[1]:
            the = "" if before.endswith("the ") else "the "
            return f"{the}{english_ordinal(int(first.parts[2]))} to {self.said(last, '', after)}"
        if first.is_plain and last.is_plain and _is_year(first.digits) and len(last.digits) in (2, 4):
            return f"{_year(first.digits)} to {_year(last.digits)}"
        if first == last and first.digits == "50":
            return "fifty fifty"
        if first.currency == last.currency:
            first = first._replace(currency="")
        if first.unit == last.unit != "%":
            first = first._replace(unit="")
        begin = self.number(first.digits) if first.is_plain else self.said(first, before, " to")
        return f"{begin} to {self.number(last.digits) if last.is_plain else self.said(last, '', after)}"

    def date(self, it: Quantity, before: str, after: str) -> str:
        year, month, day = it.parts
        year = ("20" if year < "50" else "19") * (len(year) == 2) + year
        ended, said = f", {_year(year)}" if year else "", english_ordinal(int(day))
        name = _MONTH_NAMES[int(month) - 1] if month.isdigit() else MONTHS.get(month.lower(), "")
        if it.unit == "of":
            return f"{'' if before.lower().endswith('the ') else 'the '}{said} of {name}{ended}"
        return f"{name} {said}{ended}".lstrip()

    def clock(self, it: Quantity, before: str, after: str) -> str:
        hour, minute, second, half = it.parts
        half = f" {half}" if half else ""
        if second[:1] == ".":
            return f"{_clock(hour, minute, False)} point {english_digits(second)}{half}"
        if second and re.search(rf"(?:{'|'.join(_YEAR_ENDS)}) \Z", before):  # after a date
            return f"{_clock(hour, minute, False)} and {self.number(str(int(second)))} seconds"
        if not second:
            return _clock(hour, minute or "00", bool(minute) and not half) + half
        counts = zip((hour, minute, second), ("hour", "minute", "second"), strict=True)
        spent = [f"{self.number(n.lstrip('0'))} {unit}{'' if float(n) == 1 else 's'}" for n, unit in counts if float(n)]
        return " ".join(spent) or "zero"

    def slash(self, it: Quantity, before: str, after: str) -> str:
        whole, over, under = it.parts
        heads = _heads(before)
        unit = UNITS.get(it.unit)
        numbers = self.number(over), self.number(under)
        if not over.isdigit():
            return " out of ".join(numbers)
        if not whole:
            even = len(over + under) == 4 and (int(over) + int(under) == 100 or over == under)
            if (over, under) in (("24", "7"), ("9", "11")) or even:
                return " ".join(numbers)
            dated = bool(set(heads[:1]) & _DATES)
            if re.search(r"\b[Oo]dds\b", before):
                return " to ".join(numbers)
            if "0" in (over[0], under[0]) and not dated:
                return " ".join(numbers)
            if is_day(it) and (dated or (16 < int(under) and int(under) not in _PARTS and not unit)):
                return self.date(Quantity("date", ("", over, under)), before, after)
            if ({"bp", "pressure"} & {*heads} or len(over) > 2) and 30 < int(under) < int(over) < 300:
                return " over ".join(numbers) + (f" {unit.many}" if unit else "")
        said = self._fraction(whole, int(over), int(under))
        return f"{said} {unit.many if whole else unit.one}" if unit else said + it.unit

    def _fraction(self, whole: str, over: int, under: int) -> str:
        if under in (10, 100) and over > 1 and not whole:
            return f"{english(over)} out of {english(under)}"
        if under < 2 or over >= under:
            return (f"{self.number(whole)} " if whole else "") + f"{english(over)} over {english(under)}"
        one = {2: "half", 4: "quarter"}.get(under) or english_ordinal(under)
        part = f"{english(over)} {one if over == 1 else 'halves' if under == 2 else one + 's'}"
        return f"{self.number(whole)} and {'a' + part[3:] if over == 1 else part}" if whole else part

    def code(self, it: Quantity, before: str, after: str) -> str:
        return ("plus " if it.parts[0] == "+" else "") + super().code(it, before, after)

    def name(self, it: Quantity, before: str, after: str) -> str:
        said = " point ".join(
            english_digits(part) if len(part) > 2 else self.number(part) for part in it.digits.split(".")
        )
        return f"{' ' if before[-1:].isalpha() else ''}{said}{' ' if after[:1].isalpha() else ''}"


_YEAR_ENDS = "teen ty ten one two three four five six seven eight nine".split()


def _heads(before: str) -> list[str]:
    """Return the words before a number without fillers, at most three, the last first."""
    found = [word.lower() for word in _WORD.findall(before)]
    while found and found[-1] in _FILLERS:
        found.pop()
    return found[:-4:-1]


def _is_year(digits: str) -> bool:
    return len(digits) == 4 and digits.isdigit() and 1010 <= int(digits) <= 2099


def _year(digits: str) -> str:
    return english_year(int(digits)) if _is_year(digits) else english(int(digits))


def _is_name(digits: str, after: str) -> bool:
    """Return whether a number with K is a resolution or a race."""
    if digits in ("2", "4", "8"):
        return not re.match(r" (?:people|users|views|followers|subscribers|dollars|a\b)|\+", after)
    return digits in ("5", "10") and bool(re.match(" (?:run|race|walk)", after))


def _decade(digits: str) -> str:
    century, tens = digits[:-2], digits[-2:]
    if tens == "00" and century in ("", "20"):
        return "two thousands"
    said = english(int(tens)).removesuffix("y") + "ies" if tens != "00" else "hundreds"
    return f"{english(int(century))} {said}" if century else said


def _clock(hour: str, minute: str, alone: bool) -> str:
    if int(minute):
        return f"{english(int(hour))} {'oh ' if minute[0] == '0' else ''}{english(int(minute))}"
    if not int(hour):
        return "midnight"
    return english(int(hour)) + ("" if not alone else " o'clock" if int(hour) <= 12 else " hundred")


ENGLISH = English()
