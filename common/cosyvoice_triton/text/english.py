"""English: how quantities are said, and the words around a number that say what it is."""

import re

from cosyvoice_triton.text.english_words import ADDRESS, MONTH, MONTHS, address, named, words
from cosyvoice_triton.text.numbers import english, english_digits, english_ordinal, english_year, is_spelled
from cosyvoice_triton.text.quantities import Quantity, Reader, is_day
from cosyvoice_triton.text.units import CURRENCIES, UNITS, Unit

# Words before a number that is said digit by digit; fillers between them are skipped.
_CODES = frozenset(
    "code pin password passcode otp id cvv cvc number numbers ext extension invoice ticket account order serial "
    "reference policy booking confirmation member customer tracking phone telephone digits postcode otp agent ending "
    "ending_in ends_in ending_with".split()
)
_CALLS = frozenset("call calls calling called dial dials dialing dialed phone ring text".split())
# Of a few digits, with "oh" for a zero.
_PLACES = frozenset(
    "room rooms flight suite route bus train highway interstate channel unit gate apartment locker seat boeing airbus "
    "porsche peugeot ferrari nokia levi's".split()
)
_SEATS = _PLACES | {"row", "platform", "section", "exit", "apt", "flat", "block"}  # a letter after the number is no unit
_DATES = frozenset("on by until till before after from since due starting monday tuesday wednesday thursday".split())
_DATES |= frozenset("friday saturday sunday mon tue tues wed thu thur thurs fri sat sun".split())
_FILLERS = frozenset("is was are : = # or and".split()) | frozenset(english_digits("0123456789").split())
_NO_CODES = frozenset("AD BC CE AM PM TV UP".split())  # two capitals before a number that is one
_WORD = re.compile(r"[A-Za-z][A-Za-z'’]*|[:=#]|[^\sA-Za-z.,]")
_COUNTED = re.compile(
    r"\s+(?:(?:more|other|new|different|of)\s+)?(?!(?:was|is|has|his|its|this|as|us|vs|thus|plus|versus|yes|always|perhaps"
    r"|besides|unless|afterwards|times)\b)(?:[a-z]+(?<!s)s\b|people|men|women|children)"
)
_SCALES = {"k": "thousand", "m": "million", "mn": "million", "b": "billion", "bn": "billion"}
_SCALES |= {"t": "trillion", "tn": "trillion"}
_SIGNS = {"-": "minus ", "+": "plus ", "±": "plus or minus ", "~": "about ", "≈": "about "}
_DENOMINATORS = {2: ("half", "halves"), 4: ("quarter", "quarters")}
_ERAS = frozenset("the early late mid in his her my their our your".split())  # before a decade
_INCHES = re.compile(
    r"""(?<![\w.])(\d{1,2})['’′] ?(\d{1,2})(["”″]|'')?(?!\w)|(?<![\w"])(\d{1,3}(?:\.\d{1,2})?)["″](?=\s[A-Za-z])"""
)
_MONTH_NAMES = list(dict.fromkeys(MONTHS.values()))


def number(digits: str) -> str:
    """Return the words of a whole or decimal number; of a very long one, and after a leading zero, its digits."""
    whole, _, decimals = digits.partition(".")
    words = english_digits(whole) if is_spelled(whole) else english(int(whole or 0))
    return words + (f" point {english_digits(decimals)}" if decimals else "")


def _is_year(digits: str) -> bool:
    return len(digits) == 4 and 1010 <= int(digits) <= 2099


def _year(digits: str) -> str:
    return english_year(int(digits)) if _is_year(digits) else number(digits)


def _heads(before: str) -> list[str]:
    """Return the words before a number without fillers, the last first."""
    found = [word.lower() for word in _WORD.findall(before)]
    while found and found[-1] in _FILLERS:
        found.pop()
    return found[:-4:-1]


class English(Reader):
    """Reads English."""

    months = MONTH
    scales = (
        r"(?:thousand|million|billion|trillion)\b|(?<=\d)(?:(?:st|nd|rd|th)(?![A-Za-z])|['’]?s(?![\w/])|[kKM](?![A-Za-z])"
        r"|x(?!\w|\s?(?:[-+=*/^²]|plus|minus|equals|squared|cubed)))"
    )
    money_scales = r"[kKmMbBtT]n?\b"
    per_word = r"[a-z]{2,12}(?![A-Za-z])"
    gap = "[ -]?"
    unit_end = r"(?:\.(?=,|\s[a-z(]))?"

    def __init__(self) -> None:
        super().__init__("one")

    def unit_name(self, unit: Unit, language: str) -> str:
        return unit.one

    def read(self, text: str) -> str:
        text = _INCHES.sub(_inches, text)
        if "." not in text or not ADDRESS.search(text):
            return self._without_addresses(text)
        parts, end = list[str](), 0
        for found in ADDRESS.finditer(text):
            if (said := address(found[0])) != found[0]:
                parts += [self._without_addresses(text[end : found.start()]), said]
                end = found.end()
        return "".join([*parts, self._without_addresses(text[end:])])

    def _without_addresses(self, text: str) -> str:
        return named(super().read(words(text)))

    def amount(self, it: Quantity, before: str, after: str) -> str:
        sign = "".join(_SIGNS[mark] for mark in it.sign)
        per = f" per {self._per(it.per)}" if it.per else ""
        return sign + (self._money(it) if it.currency else self._measured(it, before, after)) + per

    def _per(self, per: str) -> str:
        count, unit = re.fullmatch(r"(\d*)\s?(.*)", per).groups()  # type: ignore[union-attr]  # matches all
        name = UNITS[unit] if unit in self.names else Unit(unit, unit, "", "", "")
        return f"{number(count)} {name.many}" if count else name.one

    def _money(self, it: Quantity) -> str:
        one, many, *_, cent = CURRENCIES[it.currency]
        whole, _, decimals = it.digits.partition(".")
        if it.scale:
            amount = it.digits.rstrip("0").rstrip(".") if decimals else it.digits
            return f"{number(amount)} {_SCALES.get(it.scale.lower(), it.scale)} {many}"
        name = one if whole == "1" else many
        if not cent or len(decimals) != 2:
            return f"{number(it.digits)} {one if it.digits == '1' else many}"
        small, _, pence = cent.partition("/")
        cents = f"{english(int(decimals))} {small if int(decimals) == 1 else pence or small + 's'}"
        if not int(decimals):
            return f"{number(whole)} {name}"
        return cents if not int(whole or 0) else f"{number(whole)} {name} and {cents}"

    def _measured(self, it: Quantity, before: str, after: str) -> str:
        unit, scale = it.unit, it.scale
        if it.power:
            power = {"2": " squared", "3": " cubed"}.get(it.power) or f" to the power of {'minus ' * (it.power[0] == '-')}{number(it.power.lstrip('-'))}"
            return number(it.digits) + power + (f" {UNITS[unit].many}" if unit in UNITS else "")
        if len(unit) == 1 and unit.isupper() and (heads := _heads(before)) and heads[0] in _SEATS:
            return f"{number(it.digits)} {unit}"
        if scale and scale[0] in "'’s" and scale != "st":
            if self._is_decade(it.digits, scale, before):
                return _decade(it.digits)
            unit, scale = "s", ""
        if scale in ("st", "nd", "rd", "th"):
            return english_ordinal(int(it.digits)) if it.digits.isdigit() else number(it.digits) + scale
        if scale == "x":
            return f"{number(it.digits)} times"
        if scale in ("k", "K") and not it.sign and _is_name(it.digits, after):
            return f"{number(it.digits)} K"
        if scale:
            scale = " " + _SCALES.get(scale.lower(), scale)
        if not unit:
            return number(it.digits) + scale if scale or not it.parts[0].isdigit() else self._plain(it.digits, before, after)
        if unit[0] in "°℃℉":
            kind = {"C": " Celsius", "℃": " Celsius", "F": " Fahrenheit", "℉": " Fahrenheit"}.get(unit[-1], "")
            return f"{number(it.digits)} degree{'' if it.digits == '1' else 's'}{kind}"
        return f"{number(it.digits)}{scale} {UNITS[unit].one if it.digits == '1' else UNITS[unit].many}"

    def _is_decade(self, digits: str, scale: str, before: str) -> bool:
        if len(digits) not in (2, 4) or digits[-1] != "0" or (len(digits) == 4 and not _is_year(digits)):
            return False
        heads = _heads(before)
        return scale != "s" or len(digits) == 4 or before[-1:] in "'’" or bool(heads and heads[0] in _ERAS)

    def _plain(self, digits: str, before: str, after: str) -> str:
        """Return a number that has nothing but its digits and the words around it."""
        heads, counted = _heads(before), bool(_COUNTED.match(after))
        head = heads[0] if heads else ""
        if before.endswith("number ") and len(digits) > 3:
            return english_digits(digits)
        if len(digits) > 2:
            if not counted and (head in _CODES or "_".join(heads[1::-1]) in _CODES or (head in _CALLS and len(digits) < 5)):
                return english_digits(digits)
            if digits == "911" or (re.search(r"\b[A-Z]{2} $", before) and before[-3:-1] not in _NO_CODES and len(digits) < 6):
                return english_digits(digits)
            if head in _PLACES and len(digits) < 5:
                return english_digits(digits, "oh")
        if _is_year(digits) and not (counted and int(digits) % 100):
            return _year(digits)
        return english_digits(digits) if len(digits) > 6 else number(digits)

    def range(self, first: Quantity, last: Quantity, before: str, after: str, dash: str) -> str:
        if first.kind == "date" and last.unit == "of" and not first.parts[1]:
            return f"{'' if before.endswith('the ') else 'the '}{english_ordinal(int(first.digits or first.parts[2]))} to {self._said(last, '', after)}"
        if first.is_plain and last.is_plain and _is_year(first.digits) and len(last.digits) in (2, 4):
            return f"{_year(first.digits)} to {_year(last.digits)}"
        if first.currency == last.currency:
            first = first._replace(currency="")
        plain = first.kind == "amount" and not first.currency and not first.unit and not first.scale
        if first.unit == last.unit and (dash or plain):
            first = first._replace(unit=first.unit if first.unit == "%" else "")
        begin = number(first.digits) if plain and not first.sign else self._said(first, before, " to")
        end = number(last.digits) if last.is_plain else self._said(last, "", after)
        return f"{begin} to {end}"

    def date(self, it: Quantity, before: str, after: str) -> str:
        year, month, day = it.parts
        if len(year) == 2:
            year = ("20" if year < "50" else "19") + year
        ended = f", {_year(year)}" if year else ""
        said = english_ordinal(int(day))
        if not month:
            return said + ended
        name = _MONTH_NAMES[int(month) - 1] if month.isdigit() else MONTHS[month.rstrip(".").lower()]
        if it.unit == "of":
            return f"{'' if before.lower().endswith('the ') else 'the '}{said} of {name}{ended}"
        return f"{name} {said}{ended}"

    def clock(self, it: Quantity, before: str, after: str) -> str:
        hour, minute, second, half = it.parts
        half = f" {half}" if half else ""
        if second and before.rstrip(" T")[-1:].isalpha() and re.search(r"(?:teen|ty|ten|one|two|three|four|five|six|seven|eight|nine) $", before):
            return f"{_clock(hour, minute, False)} and {number(str(int(second)))} seconds"
        if second and not second.startswith("."):
            return _duration(hour, minute, second)
        return _clock(hour, minute or "00", not half and bool(minute)) + (f" point {english_digits(second)}" if second else "") + half

    def ratio(self, it: Quantity, before: str, after: str) -> str:
        return " to ".join(map(number, it.parts))

    def slash(self, it: Quantity, before: str, after: str) -> str:
        whole, over, under = it.parts
        heads = _heads(before)
        head = heads[0] if heads else ""
        pair = not whole and over.isdigit()
        if pair and (over, under) in (("24", "7"), ("9", "11")) or pair and len(over + under) == 4 and (int(over) + int(under) == 100 or over == under):
            return f"{number(over)} {number(under)}"
        if pair and head in _DATES and is_day(it):
            return self.date(Quantity("date", ("", over, under)), before, after)
        if pair and (head == "odds" or "odds" in heads[:3]):
            return f"{number(over)} to {number(under)}"
        if over.startswith("0") or under.startswith("0"):
            return f"{number(over)} {number(under)}"
        if pair and (head in ("bp", "pressure") or (len(over) > 2 or "pressure" in heads) and 30 < int(under) < int(over) < 300):
            return f"{number(over)} over {number(under)}" + (f" {UNITS[it.unit].many}" if it.unit in UNITS else "")
        if not over.isdigit():
            return f"{number(over)} out of {number(under)}"
        said = self._fraction(whole, int(over), int(under))
        return f"{said} {UNITS[it.unit].many if whole else UNITS[it.unit].one}" if it.unit in UNITS else said + it.unit

    def _fraction(self, whole: str, over: int, under: int) -> str:
        if under in (10, 100) and over > 1 and not whole:
            return f"{english(over)} out of {english(under)}"
        if under == 1 or over >= under:
            return f"{english(over)} over {english(under)}"
        one, many = _DENOMINATORS.get(under) or (english_ordinal(under), english_ordinal(under) + "s")
        part = f"{english(over)} {one if over == 1 else many}"
        return f"{number(whole)} and {'a' + part[3:] if over == 1 else part}" if whole else part

    def code(self, it: Quantity, before: str, after: str) -> str:
        plus = "plus " if it.parts[0] == "+" else ""
        return plus + ", ".join(map(english_digits, it.parts[1 if plus else 0 :]))

    def version(self, it: Quantity, before: str, after: str) -> str:
        return " point ".join(map(number, it.parts))

    def name(self, it: Quantity, before: str, after: str) -> str:
        said = " point ".join(english_digits(part) if len(part) > 2 else number(part) for part in it.digits.split("."))
        return f"{' ' if before[-1:].isalpha() else ''}{said}{' ' if after[:1].isalpha() else ''}"


def _inches(match: re.Match[str]) -> str:
    """Return feet and inches, and inches where the mark does not close a quotation."""
    if match[1]:
        return f"{match[1]} feet {match[2]}" + (" inches" if match[3] else "")
    return f"{match[4]} inch" if match.string.count('"') % 2 else match[0]


def _is_name(digits: str, after: str) -> bool:
    """Return whether a number with K is a resolution or a race."""
    if digits in ("2", "4", "8"):
        return not re.match(r" (?:people|users|views|followers|subscribers|dollars|a\b)", after) and not after.startswith("+")
    return digits in ("5", "10") and bool(re.match(" (?:run|race|walk)", after))


def _decade(digits: str) -> str:
    century, tens = digits[:-2], digits[-2:]
    said = english(int(tens)).removesuffix("y") + "ies" if tens != "00" else "hundreds"
    if tens == "00" and century in ("", "20"):
        return "two thousands"
    return f"{english(int(century))} {said}" if century else said


def _clock(hour: str, minute: str, alone: bool) -> str:
    if int(minute):
        return f"{english(int(hour))} {'oh ' if minute[0] == '0' else ''}{english(int(minute))}"
    if not int(hour):
        return "midnight"
    return english(int(hour)) + ("" if not alone else " o'clock" if int(hour) <= 12 else " hundred")


def _duration(*parts: str) -> str:
    counted = zip(parts, ("hour", "minute", "second"), strict=True)
    said = [f"{number(part.lstrip('0'))} {unit}{'' if int(float(part)) == 1 else 's'}" for part, unit in counted if float(part)]
    return " ".join(said) or "zero"


ENGLISH = English()
