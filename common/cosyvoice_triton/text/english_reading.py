"""English: how quantities are said, and what the words around a number say that it is."""

import re
from math import gcd

from cosyvoice_triton.text.quantities import ORDINALS, Around, Quantity, Reader
from cosyvoice_triton.text.tables import CURRENCIES, UNITS, counted

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()
_SCALES = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))
_ORDINALS = {"one": "first", "two": "second", "three": "third", "eight": "eighth", "nine": "ninth"}

_DATED = re.compile(rf"(?:{'|'.join(ONES)}|ty|at) \Z")  # the year of a date before a clock time


class English(Reader):
    """Reads English."""

    functions = {
        "ordinal": lambda number: english_ordinal(int(number)),
        "decade": lambda written: re.sub("ys$", "ies", english_year(int(written.strip("s'’"))) + "s"),
        "pair": lambda written: " ".join(english(int(number)) for number in re.findall(r"\d+", written)),
        "inches": lambda written: re.sub('["”″]', " inches", re.sub('(?<=feet1)["”″]|["”″](?= )', " inch", written)),
        "one": lambda sign: counted(UNITS.get(sign, {"en": sign})["en"], one=True),
        "letters": lambda word: word.replace(".", ""),
    }

    def address(self, written: str) -> str:
        """Return "example dot com"; "" for another name with a full stop, such as of a file."""
        host, ending = written.partition("://")[2] or written, re.search(r"\.([A-Za-z]+)(?:[:/]|\Z)", written)
        if not (ending and re.fullmatch(self.words.patterns["hosts"], ending[1])):
            return ""
        names = self.words.tables["symbol"] | self.words.tables["address"]
        parts = re.findall(r"\d+|[^\W\d_]+|.", host, re.ASCII)
        return " ".join(self.spelled(part) if part.isdigit() else names.get(part, part).strip() for part in parts)

    def amount(self, it: Quantity, at: Around) -> str:
        scale, digits = it.scale, it.digits
        letter = it.unit or it.scale * (at("seat") and not it.currency)
        if len(letter) == 1 and letter.isupper() and (at("seat") or re.match(r"\. [A-Z\d]", at.after)):
            return f"{self.plain(digits, Around(self.words, at.before, f' {letter}{at.after}'))} {letter}"
        if scale in ORDINALS:
            said = english_ordinal(int(digits)) if digits.isdigit() else self.number(digits) + scale
            return said + self.unit_of(it.but(number="1", scale=""))
        whole, _, cents = digits.partition(".")
        cent = CURRENCIES.get(it.currency, {}).get("cent")
        if cent and len(cents) == 2 and not scale and float(digits):
            paid = _spent((whole, self.words.money[it.currency]), (cents, cent))
            return self.sign(it, at) + " and ".join(paid) + self.unit_of(it.but(currency=""))
        if at("version"):
            return self.version(it, at)
        if it.but(per="").is_plain:
            return self.plain(digits, at) + self.unit_of(it)
        digits = digits.rstrip("0").rstrip(".") if it.currency and "." in digits else digits
        blank = " " * (not it.unit and at.after[:1].isalpha())
        scale = f" {self.words.tables['scale'].get(scale.lower(), scale)}" if scale else blank
        return self.sign(it, at) + self.powered(it.but(number=digits)) + scale + self.unit_of(it)

    def plain(self, digits: str, at: Around) -> str:
        if self.is_code(digits, at):
            return self.spelled(digits)
        is_year = "1010" <= digits <= "2099" and not (int(digits) % 100 and at("counted"))
        if len(digits) == 4 and digits[0] != "0" and (is_year or at("house")):
            return english_year(int(digits))
        is_oh = (2 < len(digits) < 5 and at("place")) or (digits[0] == "0" and at.before[-1:] in ("'", "’"))
        return self.spelled(digits).replace("zero", "oh") if is_oh else self.number(digits)

    def date(self, it: Quantity, at: Around) -> str:
        year = ("20" if it.year < "50" else "19") * (len(it.year) == 2) + it.year
        ended, said = f", {english_year(int(year))}" if year else "", english_ordinal(int(it.day))
        months = self.words.patterns["month"].split("|")
        name = months[int(it.month) - 1] if it.month.isdigit() else self.words.tables["short"].get(it.month, it.month)
        if it.of:
            said = f"{'' if at.before.lower().endswith('the ') else 'the '}{said}"
            return f"{said} of {name}{ended}" if name else said
        return f"{name} {said}{ended}".lstrip()

    def clock(self, it: Quantity, at: Around) -> str:
        is_alone = bool(it.minute) and not it.half + it.second
        said = self.sign(it, at) * (it.sign in "~≈") + _clock(it.hour, it.minute or "00", is_alone)
        if it.second[:1] == ".":
            said += f" point {self.spelled(it.second)}"
        elif it.second and not _DATED.search(at.before):
            return " ".join(_spent((it.hour, "hour*"), (it.minute, "minute*"), (it.second, "second*"))) or "zero"
        elif it.second:
            said += f" and {self.number(str(int(it.second)))} seconds"
        return said + f" {it.half}".rstrip()

    def slash(self, it: Quantity, at: Around) -> str:
        numbers = self.number(it.over), self.number(it.under)
        if not (it.over + it.under).isdigit() or (at("graded") and not at("share")):
            return " out of ".join(numbers) + self.unit_of(it)
        if "odds" in at.before.lower():
            return " to ".join(numbers)
        if ("0" in (it.over[:-1][:1], it.under[0]) or 12 < int(it.over) == int(it.under) - 1 < 99) and not at("date"):
            return " ".join(numbers)
        if 30 < int(it.under) < int(it.over) < 300:
            return " over ".join(numbers) + self.unit_of(it)
        return super().slash(it, at)

    def fraction(self, it: Quantity, at: Around) -> str:
        whole, over, under = it.whole, int(it.over), int(it.under)
        unit, one = self.words.units.get(it.unit), {2: "half", 4: "quarter"}.get(under) or english_ordinal(under)
        is_score = under in (10, 100) or (gcd(over, under) > 1 and over < under and not at("share"))
        if is_score and over != 1 and not whole:
            said = f"{english(over)} out of {english(under)}"
        elif over >= under:
            said = f"{english(over)} over {english(under)}"
        else:
            said = f"{'a' if over == 1 and whole else english(over)} {one if over == 1 else one + 's'}"
        said = self.sign(it, at) + (f"{self.number(whole)} and {said}" if whole else said)
        return f"{said} {counted(unit, not whole)}" if unit else said + it.unit

    def name(self, it: Quantity, at: Around) -> str:
        is_size = len(it.text) == 4 and it.text.isdigit() and at.after[:1] in "xp"
        said = english_year(int(it.text)) if is_size else self.version(it, at)
        return f"{' ' if at.before[-1:].isalpha() else ''}{said}{' ' if at.after[:1].isalpha() else ''}"


def _spent(*counts: tuple[str, str]) -> list[str]:
    """Return numbers that are not 0, each with the name of its unit."""
    some = ((ENGLISH.number(number.lstrip("0")), unit, float(number)) for number, unit in counts if float(number or 0))
    return [f"{words} {counted(unit, number == 1)}" for words, unit, number in some]


def _clock(hour: str, minute: str, alone: bool) -> str:
    if int(minute):
        return f"{english(int(hour))} {'oh ' if minute[0] == '0' else ''}{english(int(minute))}"
    if not int(hour):
        return "midnight"
    return english(int(hour)) + ("" if not alone else " o'clock" if int(hour) <= 12 else " hundred")


def english(number: int) -> str:
    """Return a number of at least 0 in English words."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return _TENS[number // 10] + (f" {ONES[number % 10]}" if number % 10 else "")
    scale, name = next(each for each in _SCALES if number >= each[0])
    return f"{english(number // scale)} {name}" + (f" {english(number % scale)}" if number % scale else "")


def english_ordinal(number: int) -> str:
    """Return "first" for 1."""
    before, _, last = english(number).rpartition(" ")
    last = _ORDINALS.get(last) or re.sub("ve$", "f", re.sub("y$", "ie", last)) + "th"
    return f"{before} {last}".strip()


def english_year(year: int) -> str:
    """Return a year as it is said: "nineteen oh five", "two thousand eight", "twenty ten"."""
    century, rest = divmod(year, 100)
    if year < 1010 or (century % 10 == 0 and rest < 10):
        return english(year)
    return f"{english(century)} {'hundred' if not rest else 'oh ' * (rest < 10) + english(rest)}"


ENGLISH = English("en", english, ONES)
