"""English in words: money, thousands, dates, clock times, ranges, units, names with numbers; by rules, no grammar."""

import re

from cosyvoice_triton.text.english_words import ADDRESS, MONTHS, address, named, words
from cosyvoice_triton.text.numbers import LONGEST, english, english_digits, english_ordinal, english_year, reader

_N = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_ND = rf"(?:{_N}(?:\.\d+)?|\.\d+)"
_DASH = r"\s?[-–—~]\s?"

_MONTH_NAMES = list(dict.fromkeys(MONTHS.values()))
_MONTH = "|".join((*_MONTH_NAMES, *(rf"{name[:3]}\b\.?" for name in _MONTH_NAMES if name != "May"), r"Sept\b\.?"))

_CURRENCIES = {  # one, many, one hundredth, many of these
    "$": ("dollar", "dollars", "cent", "cents"), "US$": ("US dollar", "US dollars", "cent", "cents"),
    "C$": ("Canadian dollar", "Canadian dollars", "cent", "cents"), "A$": ("Australian dollar", "Australian dollars", "cent", "cents"),
    "NZ$": ("New Zealand dollar", "New Zealand dollars", "cent", "cents"), "S$": ("Singapore dollar", "Singapore dollars", "cent", "cents"),
    "CHF": ("Swiss franc", "Swiss francs", "", ""),
    "HK$": ("Hong Kong dollar", "Hong Kong dollars", "cent", "cents"), "€": ("euro", "euros", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"), "¥": ("yen", "yen", "", ""), "￥": ("yuan", "yuan", "", ""), "₹": ("rupee", "rupees", "paisa", "paise"),
    "₩": ("won", "won", "", ""), "₽": ("ruble", "rubles", "kopeck", "kopecks"),
}  # fmt: skip
_CURRENCIES |= {"CA$": _CURRENCIES["C$"], "AU$": _CURRENCIES["A$"]}
_SIGN = "|".join(re.escape(sign) for sign in sorted(_CURRENCIES, key=len, reverse=True))
_CODES = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥", "CAD": "C$", "AUD": "A$", "INR": "₹", "HKD": "HK$"}
_CODES |= {"NZD": "NZ$", "SGD": "S$", "CNY": "￥", "RMB": "￥", "KRW": "₩", "CHF": "CHF"}
_CODE_NAMES = "|".join(_CODES)
_SCALES = {"k": "thousand", "m": "million", "mn": "million", "mm": "million", "b": "billion", "bn": "billion"}
_SCALES |= {"t": "trillion", "tn": "trillion"}
_SCALE = r"(?:\s?(thousand|million|billion|trillion)\b|([kKmMbBtT]n?)\b)"

_UNITS = {
    "km/h": "kilometers per hour", "kph": "kilometers per hour", "kmh": "kilometers per hour", "m/s": "meters per second",
    "mph": "miles per hour", "km²": "square kilometers", "m²": "square meters", "m2": "square meters", "cm²": "square centimeters",
    "m³": "cubic meters", "sq ft": "square feet", "sq. ft.": "square feet", "km": "kilometers", "cm": "centimeters",
    "mm": "millimeters", "nm": "nanometers", "m": "meters", "mi": "miles", "ft": "feet", "yd": "yards", "kg": "kilograms",
    "mg": "milligrams", "g": "grams", "lb": "pounds", "lbs": "pounds", "oz": "ounces", "ml": "milliliters", "mL": "milliliters",
    "l": "liters", "L": "liters", "gal": "gallons", "TB": "terabytes", "GB": "gigabytes", "MB": "megabytes", "KB": "kilobytes",
    "kB": "kilobytes", "Mbps": "megabits per second", "Gbps": "gigabits per second", "GHz": "gigahertz", "MHz": "megahertz",
    "kHz": "kilohertz", "Hz": "hertz", "kWh": "kilowatt hours", "kW": "kilowatts", "MW": "megawatts", "W": "watts", "V": "volts",
    "mAh": "milliamp hours", "dB": "decibels", "kcal": "kilocalories", "rpm": "revolutions per minute", "ms": "milliseconds",
    "sec": "seconds", "secs": "seconds", "s": "seconds", "min": "minutes", "mins": "minutes", "hr": "hours", "hrs": "hours",
    "h": "hours", "yrs": "years", "yr": "years", "pts": "points", "psi": "pounds per square inch", "px": "pixels", "ppm": "parts per million",
    "tbsp": "tablespoons", "tsp": "teaspoons", "fl oz": "fluid ounces", "fps": "frames per second", "bpm": "beats per minute",
    "ha": "hectares", "MB/s": "megabytes per second", "GB/s": "gigabytes per second", "km/s": "kilometers per second", "kJ": "kilojoules",
    "ft²": "square feet", "kPa": "kilopascals", "hPa": "hectopascals", "µm": "micrometers", "μm": "micrometers", "g/L": "grams per liter",
    "mg/dL": "milligrams per deciliter", "mmHg": "millimeters of mercury", "kg/m³": "kilograms per cubic meter", "mA": "milliamps",
}  # fmt: skip
_ONE = {"feet": "foot", "hertz": "hertz", "gigahertz": "gigahertz", "megahertz": "megahertz", "kilohertz": "kilohertz"}
_UNIT = "|".join(re.escape(unit) for unit in sorted(_UNITS, key=len, reverse=True))

_BOOKS = (
    "Genesis|Exodus|Deuteronomy|Joshua|Job|Psalms?|Proverbs|Ecclesiastes|Isaiah|Jeremiah|Ezekiel|Daniel|Matthew|Mark|Luke|"
    "John|Acts|Romans|Corinthians|Galatians|Ephesians|Philippians|Colossians|Timothy|Hebrews|James|Peter|Revelation|Surah|Quran"
)
_BOUNDS = {"<": "less than ", ">": "more than ", "≈": "about "}  # where a number has nothing before it to compare
_BOUNDS |= dict.fromkeys(("≥", ">="), "at least ") | dict.fromkeys(("≤", "<="), "at most ")
_DENOMINATORS = {2: ("half", "halves"), 4: ("quarter", "quarters")}
_ROMAN = r"(?=[IVXL])(?:XL|L?X{0,3})(?:IX|IV|V?I{0,3})"
_ROMAN_VALUES = {"I": 1, "V": 5, "X": 10, "L": 50}
_TITLES = "King|Queen|Pope|Emperor|Empress|Tsar|Czar|Prince|Princess|Kaiser|Sultan|Duke|Pharaoh|Saint"
_MONARCHS = (
    "Albert|Alexander|Alfonso|Amenhotep|Anne|Benedict|Boniface|Catherine|Charles|Christian|Clement|Constantine|Darius|Edward|"
    "Elizabeth|Ferdinand|Francis|Franz|Frederick|Friedrich|George|Gregory|Gustav|Harald|Henri|Henry|Innocent|Isabella|Ivan|"
    "James|John|Joseph|Julius|Justinian|Leo|Leopold|Louis|Ludwig|Margaret|Margrethe|Mary|Maximilian|Mehmed|Mohammed|Napoleon|"
    "Nicholas|Otto|Paul|Pedro|Peter|Philip|Pius|Ptolemy|Rama|Ramesses|Ramses|Richard|Rudolf|Sixtus|Stephen|Urban|Victor|"
    "Vittorio|Wilhelm|William|Xerxes"
)


def number(digits: str) -> str:
    """Return the words of a whole or decimal number; of a very long one, and after a leading zero, its digits."""
    whole, _, decimals = digits.replace(",", "").partition(".")
    spelled = len(whole) > LONGEST or (len(whole) > 1 and whole.startswith("0"))
    words = english_digits(whole) if spelled else english(int(whole or 0))
    return words + (f" point {english_digits(decimals)}" if decimals else "")


def _plain(digits: str) -> str:
    """Return a number without commas: one of four digits that may be a year as one."""
    if len(digits) == 4 and 1010 <= int(digits) <= 2099:
        return english_year(int(digits))
    return number(digits)


def _groups(match: re.Match[str]) -> str:
    plus = "plus " if match[0].lstrip().startswith("+") else ""
    return plus + ", ".join(english_digits(group) for group in re.findall(r"\d+", match[0]))


def _money(match: re.Match[str]) -> str:
    sign, whole, cents = match[2], match[3].replace(",", ""), match[4]
    one, many, hundredth, hundredths = _CURRENCIES[sign]
    about = "about " if match[1] and match[1] in "~≈" else "minus " if match[1] else ""
    scale = match[5] or _SCALES.get((match[6] or "").lower())
    if scale:
        decimals = f".{cents}".rstrip(".0") if cents else ""
        return f"{about}{number(whole + decimals)} {scale} {many}"
    if cents is None or not hundredth or len(cents) != 2:
        amount = number(whole + ("." + cents if cents else ""))
        return f"{about}{amount} {one if whole == '1' and not cents else many}"
    small = f"{english(int(cents))} {hundredth if int(cents) == 1 else hundredths}"
    big = f"{number(whole)} {one if whole == '1' else many}"
    if not int(cents):
        return about + big
    return about + (small if not int(whole) else f"{big} and {small}")


def _amount_range(match: re.Match[str]) -> str:
    scale = match[4] or _SCALES.get((match[5] or "").lower(), "")
    return f"{number(match[2])} to {number(match[3])} {scale + ' ' if scale else ''}{_CURRENCIES[match[1]][1]}"


def _after(match: re.Match[str], sign: str) -> str:
    one, many, *_ = _CURRENCIES[sign]
    return f"{number(match[1])} {one if match[1] == '1' else many}"


def _date(month: str, day: str, year: str | None) -> str:
    name = _MONTH_NAMES[int(month) - 1] if month.isdigit() else MONTHS[month.rstrip(".").lower()]
    if year and len(year) == 2:
        year = ("20" if year < "50" else "19") + year
    return f"{name} {english_ordinal(int(day))}" + (f", {_plain(year)}" if year else "")


def _clock(hour: str, minute: str, alone: bool) -> str:
    if int(minute):
        return f"{english(int(hour))} {'oh ' if minute[0] == '0' else ''}{english(int(minute))}"
    if not int(hour):
        return "midnight"
    return english(int(hour)) + ("" if not alone else " o'clock" if int(hour) <= 12 else " hundred")


def _moment(match: re.Match[str]) -> str:
    """Return the time that a date is followed by, as machines write it."""
    seconds = int(match[3] or 0)
    return f" {_clock(match[1], match[2], not seconds)}{f' and {english(seconds)} seconds' if seconds else ''}{match[4] and ' UTC'}"


def _time(match: re.Match[str]) -> str:
    half = match[3]
    return _clock(match[1], match[2], not half) + (f" {half.lstrip()}" if half else "")


def _duration(match: re.Match[str]) -> str:
    units = zip(match.groups(), ("hour", "minute", "second"), strict=True)
    return " ".join(
        f"{english(int(count))} {unit}{'' if int(count) == 1 else 's'}" for count, unit in units if int(count)
    )


def _fraction(over: int, under: int) -> str:
    if under == 1:
        return english(over)
    one, many = _DENOMINATORS.get(under) or (english_ordinal(under), english_ordinal(under) + "s")
    return f"{english(over)} {one if over == 1 else many}"


def _fractions(match: re.Match[str]) -> str:
    whole, over, under = match[1], int(match[2]), int(match[3])
    if not under:
        return match[0]
    units = _UNITS[match[4]] if match[4] else ""
    if whole:
        part = f"a {_fraction(1, under).removeprefix('one ')}" if over == 1 else _fraction(over, under)
        return f"{number(whole)} and {part} {units}".rstrip()
    if units:
        return f"{_fraction(over, under)} {_ONE.get(units) or units.removesuffix('s')}"
    if under in (10, 100) and over > 1:
        return f"{english(over)} out of {english(under)}"
    return _fraction(over, under) if over < under else f"{english(over)} over {english(under)}"


def _unit(match: re.Match[str]) -> str:
    digits, unit = match[1], _UNITS[match[2]]
    if digits == "1":
        first, blank, rest = unit.partition(" ")
        last = rest.startswith(("feet", "meters", "kilometers", "centimeters", "hours")) and not rest.startswith("per")
        unit = (
            f"{first} {_ONE.get(rest) or rest[:-1]}"
            if last
            else (_ONE.get(first) or first.removesuffix("s")) + blank + rest
        )
    return f"{number(digits)} {unit}"


def _degrees(match: re.Match[str]) -> str:
    scale = {"C": " Celsius", "℃": " Celsius", "F": " Fahrenheit", "℉": " Fahrenheit"}.get(match[3][-1], "")
    return f"{'minus ' if match[1] else ''}{number(match[2])} degree{'' if match[2] == '1' else 's'}{scale}"


def _power(match: re.Match[str]) -> str:
    exponent = int(match[1] or (2 if match[2] == "²" else 3))
    minus = "minus " if exponent < 0 else ""
    return {2: " squared", 3: " cubed"}.get(exponent, f" to the power of {minus}{english(abs(exponent))}")


def _roman(letters: str) -> int:
    values = [_ROMAN_VALUES[letter] for letter in letters]
    return sum(-value if value < max(values[index:]) else value for index, value in enumerate(values))


def _attached(match: re.Match[str]) -> str:
    """Read digits that touch letters: short ones as a number, long ones one by one."""
    digits = match[0]
    words = number(digits) if len(digits) <= 2 else english_digits(digits)
    before = match.string[match.start() - 1 : match.start()].isalpha()
    after = match.string[match.end() : match.end() + 1].isalpha()
    return f"{' ' if before else ''}{words}{' ' if after else ''}"


def _room(match: re.Match[str]) -> str:
    return match[1] + (english_digits(match[2], "oh") if len(match[2]) >= 3 else english(int(match[2])))


def _decade(match: re.Match[str]) -> str:
    tens = english(int(match[2])).removesuffix("y") + "ies" if match[2] != "00" else "hundreds"
    if match[1]:
        century = english(int(match[1]))
        return "two thousands" if match[1] + match[2] == "2000" else f"{century} {tens}"
    return "two thousands" if match[2] == "00" else tens


def _year_or_number(match: re.Match[str]) -> str:
    digits, after = match[0], match.string[match.end() :]
    counted = re.match(
        r"\s+(?:(?:more|other|new|different|of)\s+)?(?!(?:was|is|has|his|its|this|as|us|vs|thus|plus|versus|yes|always|perhaps|besides|unless)\b)(?:[a-z]+(?<!s)s\b|people|men|women|children)",
        after,
    )
    if counted and int(digits) % 100:
        return number(digits)
    return _plain(digits)


_CODE = (
    r"\b(?:(?:pass|area |zip |postal |dial(?:ing)? |access |security |verification |confirmation )?code|pin|password|passcode|"
    r"(?:order|account|tracking|ticket|card|serial|reference|invoice|case|model|part|id|phone|telephone|member|customer|policy|booking|confirmation)"
    r"(?:\s(?:number|no\.?|id|code))?|number|ID|extension|ext\.|otp)(?:\s?(?:is|:|=|was)|\s?#)?\s+#?"
)
_TO_CALL = r"\b(?:dial|call|phone|ring|text|calling|dialing|dialed|called)\s"

_read = reader(
    # Numbers that are said digit by digit.
    (r"\d{3}|\d\D\d", [
    (r"(?<![\w.,-])(?:\+\d[\d ().-]{5,}\d|(?:1[-. ])?(?:\(\d{3}\) ?|\d{3}[-. ])\d{3}[-. ]\d{4}|[2-9]\d\d-\d{4}"
     r"|1-\d{3}-\d{4}|\(?0\d{1,4}\)?[ -]\d{3,}(?:[ -]\d{2,})*)(?![\w-])", _groups),
    (r"(?<![\w.,-])(?!\d{4}-\d\d?-\d\d?(?!\d)|\d\d?-\d\d?-\d{4}(?!\d))\d{1,12}(?:-\d{1,12}){2,9}(?![\w-])|(?<![\w.,-])\d{4}(?: \d{4}){2,}(?!\d)", _groups),
    (rf"(?i)({_TO_CALL})(\d{{3,4}})(?![\d,:/-]|\.\d|\s(?:times|people|[a-z]+s\b))",
     lambda match: match[1] + english_digits(match[2])),
    (r"(?<![\d.,$£€#-])911(?![\d.,-]*\d)", "nine one one"),
    (rf"(?i)({_CODE})(\d{{3,}})(?![\d,.:/-]*\d|\s?%)", lambda match: match[1].replace("#", "number ") + english_digits(match[2])),
    (r"(?<![\w#])#(\d{4,})(?!\d)", lambda match: f"number {english_digits(match[1])}"),
    (r"(?i)\b((?:rooms?|flights?|suite|route|bus|train|highway|interstate|channel|unit|gate|apartment|locker|seat)\s)(\d{2,4})(?![\d,.:/-]*\d|[A-Za-z])", _room),
    (r"\b([A-Z]{2} )(\d{3,5})(?![\d,.:/%-]*\d|\s?%)", lambda match: match[1] + english_digits(match[2])),
    (r"\b((?:Boeing|Airbus|Porsche|Peugeot|Ferrari|Nokia|Levi['’]s) )(\d)(\d\d)(?!\d|[.,]\d)",
     lambda match: f"{match[1]}{english(int(match[2]))} " + (english(int(match[3])) if match[3][0] != "0" else english_digits(match[3], "oh"))),
    ]),
    # Set phrases.
    (r"\d/\d", [
    (r"(?<![\d/])24/7(?:/365)?(?![\d/])", "twenty four seven"),
    (r"(?<![\d/])9/11(?![\d/])", "nine eleven"),
    (r"(?<![\d/])(50/50|80/20|20/20|60/40|70/30)(?![\d/])",
     lambda match: " ".join(english(int(part)) for part in match[1].split("/"))),
    ]),
    # Money.
    (r"[$€£¥￥₩₽₹¢]|[A-Z]{3}", [
    # An amount with a code, and one without a whole part, as if it had a sign.
    (rf"(?<![\w.,$€£])({_ND}\s?(?:million|billion|trillion|[kKmMbB]n?)?)\s?({_CODE_NAMES})\b",
     lambda match: _CODES[match[2]] + match[1].rstrip()),
    (rf"\b({_CODE_NAMES})\s?(?={_ND})", lambda match: _CODES[match[1]]), (r"(?<=[$€£])\.(?=\d\d\b)", "0."),
    (rf"({_SIGN})({_ND}){_DASH}(?:{_SIGN})?({_ND}){_SCALE}?(?![\d])", _amount_range),
    (rf"([-~≈])?({_SIGN})\s?({_N})(?:\.(\d+))?{_SCALE}?", _money),
    (rf"(?<![\w.,])({_ND})\s?(US\$|€|£|\$)(?!\d)", lambda match: _after(match, match[2])),
    (rf"({_ND})\s?¢", lambda match: f"{number(match[1])} cent{'' if match[1] == '1' else 's'}"),
    ]),
    # Dates.
    (r"\d[-/.]\d|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec", [
    (r"(?<=\d{4}-\d\d-\d\d)[T ](\d\d):(\d\d)(?::(\d\d)(?:\.\d+)?)?(Z?)\b", _moment),
    (r"(?<![\d-])(\d{4})([-/.])(1[0-2]|0?[1-9])\2(3[01]|[12]\d|0?[1-9])(?![\d-])",
     lambda match: _date(match[3], match[4], match[1])),
    # Of a date with the year last, slashes and hyphens have the month first, unless it is no month; full stops the day.
    (r"(?<![\d/-])(1[0-2]|0?[1-9])([/-])(3[01]|[12]\d|0?[1-9])\2(\d{4}|(?<=/)\d\d)(?![\d/-])",
     lambda match: _date(match[1], match[3], match[4])),
    (r"(?<![\d./-])(3[01]|[12]\d|0?[1-9])([./-])(1[0-2]|0?[1-9])\2(\d{4}|(?<=/)\d\d)(?![\d/-]|\.\d)",
     lambda match: _date(match[3], match[1], match[4])),
    (r"(?i)\b((?:on|by|until|till|before|after|from|since|due|(?:mon|tues?|wed|thu(?:rs?)?|fri|sat|sun)(?:day|nesday|rday|urday)?,?) )(1[0-2]|0?[1-9])/(3[01]|[12]\d|0?[1-9])(?![\d/])",
     lambda match: match[1] + _date(match[2], match[3], None)),
    (rf"\b({_MONTH}) (3[01]|[12]\d|0?[1-9])(?:st|nd|rd|th)?{_DASH}(3[01]|[12]\d|0?[1-9])(?:st|nd|rd|th)?(?!\d)(?:,? (\d{{4}})(?!\d))?",
     lambda match: f"{_date(match[1], match[2], None)} to {english_ordinal(int(match[3]))}" + (f", {_plain(match[4])}" if match[4] else "")),
    (rf"\b({_MONTH}) (3[01]|[12]\d|0?[1-9])(?:st|nd|rd|th)?(?![\d:]|[.,]\d|\s?[%°])(?:,? (\d{{4}})(?!\d))?",
     lambda match: _date(match[1], match[2], match[3])),
    (rf"(?<![\d.,/-])(3[01]|[12]\d|[1-9])(?:st|nd|rd|th)?(?: of)? ({_MONTH})(?![a-z])(?:,? (\d{{4}})(?!\d))?",
     lambda match: f"the {english_ordinal(int(match[1]))} of {MONTHS[match[2].rstrip('.').lower()]}"
     + (f", {_plain(match[3])}" if match[3] else "") if not match.string[: match.start()].rstrip().lower().endswith("the")
     else f"{english_ordinal(int(match[1]))} of {MONTHS[match[2].rstrip('.').lower()]}" + (f", {_plain(match[3])}" if match[3] else "")),
    ]),
    # Clock times.
    (r":\d|\d\s?[AaPp]\.?\s?[Mm]\b", [
    (rf"\b({_BOOKS}) (\d{{1,3}}):(\d{{1,3}})(?:[-–](\d{{1,3}}))?(?!\d|:)", lambda match:
     f"{match[1]} {number(match[2])} {number(match[3])}" + (f" to {number(match[4])}" if match[4] else "")),
    (r"(?<![\d:])(\d{1,2}):([0-5]\d):([0-5]\d)(?![\d:])", _duration),
    (r"(?<![\d:])([01]?\d|2[0-4]):([0-5]\d)\s?[-–—]\s?([01]?\d|2[0-4]):([0-5]\d)(?![\d:])",
     lambda match: f"{_clock(match[1], match[2], False)} to {_clock(match[3], match[4], False)}"),
    (r"(?i)(?<![\d:])([01]?\d|2[0-4]):([0-5]\d)(?![\d:])(\s?[ap]\.?\s?m\b)?", _time),
    (r"(?i)(?<![\d:.,$])(1[0-2]|[1-9])\s?[-–—]\s?(1[0-2]|[1-9])(?=\s?[ap]\.?m\b)",
     lambda match: f"{english(int(match[1]))} to {english(int(match[2]))} "),
    (r"(?<![\w.:])(\d{1,4}):(\d{1,4})(?![\w:])", lambda match: f"{number(match[1])} to {number(match[2])}"),
    (r"(?i)(\b[ap]m|\d[ap]m|[ap]\.m\.)\s?[-–—]\s?(?=\d)", r"\1 to "),
    (r"(?i)(?<![\d:.,$])(1[0-2]|[1-9])\s?([ap]\.?m)\b", lambda match: f"{english(int(match[1]))} {match[2]}"),
    ]),
    # Order.
    (r"[#№IVXL]|[Nn](?:o|r|um)\.|\d(?:st|nd|rd|th|[\'’]?s)", [
    (r"\b[Nn](?:o|r|um)\.\s?(?=\d)|№\s?|(?<![\w#&])#(?=\d)", "number "),
    (rf"(?<![\w.,])({_N})(?:st|nd|rd|th)(?:-(?=[a-z]))?(?![A-Za-z])",
     lambda match: english_ordinal(int(match[1].replace(",", ""))) + (" " if match[0].endswith("-") else "")),
    (r"(?<![\w.,])['’]?((?:1\d|20)?)(\d0)['’]?s\b", _decade),
    (rf"\b((?:{_TITLES}) [A-Z][a-z]+(?: [A-Z][a-z]+)?|{_MONARCHS}) ({_ROMAN})\b(?!['’.]?[A-Z])",
     lambda match: f"{match[1]} the {english_ordinal(_roman(match[2]))}"),
    (rf"(?<=\bWar )({_ROMAN})\b",
     lambda match: english(_roman(match[1]))),
    (rf"\b(Part|Type|Book|Chapter|Act|Scene|Phase|Volume|Vol\.|Stage|Class|Title|Article|Section|Level|Grade|Round|Bowl|Appendix|Mark|Apollo|Episode) ({_ROMAN})\b",
     lambda match: f"{match[1]} {english(_roman(match[2]))}"),
    (rf"(?<=[a-z] )((?=[IVX]{{2}})(?!MIX\b){_ROMAN})(?![\w'’])", lambda match: english(_roman(match[1]))),
    ]),
    # Shares, temperatures, fractions, arithmetic.
    (r"[%°℃℉/=≠<>≥≤≈±×*÷+~x²³π^√]|\d[eE]|\s[-–]\s|-\d", [
    (rf"(?<![\w.,])({_ND})\s?%?\s?[-–—~]\s?({_ND})\s?%", lambda match:
     f"{number(match[1])}{' percent' if '%' in match[0][:-1] else ''} to {number(match[2])} percent"),
    (rf"(?<![\w)%-])-({_ND})\s?%", lambda match: f"minus {number(match[1])} percent"),
    (rf"({_ND})\s?%", lambda match: f"{number(match[1])} percent"),
    (rf"(?<![\w.,])()({_ND})\s?[-–—]\s?(?={_ND}\s?°)", lambda match: f"{number(match[2])} to "),
    (rf"(?<![\w.,])(-)?({_ND})\s?(℃|℉|°\s?[CF]\b|°)", _degrees),
    (r"(?<=[\w)])(?:\^(-?\d{1,3})|([²³]))", _power), (r"\s?π\s?", " pi "),
    (r"(?<=[\d)]) / (?=[\d(])", " divided by "),
    (r"(?<![\w/.])(\d+\.\d+)/(\d+)(?![\w/]|\.\d)", lambda match: f"{number(match[1])} out of {number(match[2])}"),
    (rf"(?<![\w/.])(?:(\d+)[ -])?(\d{{1,3}})/(\d{{1,3}})(?:\s?({_UNIT})(?![\w²³/°])|(?:ths|rds|nds)?(?![\w/]))", _fractions),
    (r"(^|[^\w)\s]\s?|\b(?:is|are|be|was|were|of|for|with|at|to|and|or|if|than) )([<>]=?|[≥≤≈])\s?(?=\d)(?!(?<=<)3\b(?! ?[%°\w]))",
     lambda match: match[1] + _BOUNDS[match[2]]),
    (r"√\s?(?=[\d(a-z])", "square root of "),
    (r"(?<![\w.])(\d+\.\d+[eE]|\d+[eE](?=[-+]))([-+]?)(\d{1,3})(?!\w)",
     lambda match: f"{number(match[1][:-1])} times ten to the power of {'minus ' if match[2] == '-' else ''}{english(int(match[3]))}"),
    (r"(?<=[\w)])\s?(?:!=|≠)\s?(?=[\w(-])", " is not equal to "),
    (r"(?<=[\w)])\s?(?:>=|≥)\s?(?=[\w(-])", " is greater than or equal to "),
    (r"(?<=[\w)])\s?(?:<=|≤)\s?(?=[\w(-])", " is less than or equal to "),
    (r"(?<=\d)\s?>\s?(?=\d)", " is greater than "), (r"(?<=\d)\s?<\s?(?=\d)", " is less than "),
    (r"(?<![\w-])([a-z])(?: ([<>]) (?=[\w-])|([<>])(?=\d|\.\d))",
     lambda match: f"{match[1]} is {'less' if '<' in match[0] else 'greater'} than "),
    (r"(?<=[\w)])\s?(?:≈)\s?(?=[\w(-])", " is about "), (r"±\s?", "plus or minus "),
    (r"(?<=\w)\s+[-–]\s+(?=\d[\d.,]*\s*=)", " minus "),
    (r"(?<=\d)\s?(?:[×*]|(?<=\s)x(?=\s))\s?(?=\d)", " times "), (r"(?<=\d)\s?x\s?(?=\d)", " by "),
    (r"(?<=\d)\s?÷\s?(?=\d)", " divided by "), (r"(?<=[\d)])\s?\+\s?(?=[\d(])", " plus "),
    (r"(?<=[\w)])\s?=\s?(?=[\w(-])", " equals "), (r"(?<![\w~])~\s?(?=\d)", "about "),
    (rf"(?<![\w.,)-])-(?={_ND})", "minus "),
    ]),
    # Ranges.
    (r"\d\s?[-–—~]\s?\d", [
    (r"(?<![\w.,-])(1[0-9]\d\d|20\d\d)\s?[-–—]\s?(1[0-9]\d\d|20\d\d|\d\d)(?![\w-]|[.,]\d)",
     lambda match: f"{_plain(match[1])} to {_plain(match[2])}"),
    (rf"(?<![\w.,/-])({_ND})\s?[–—~]\s?({_ND})(?![\d/–-])", lambda match: f"{match[1]} to {match[2]}"),
    (rf"(?<![\w.,/-])({_ND})-({_ND})(?![\d/-]|\.\d)", lambda match: f"{match[1]} to {match[2]}"),
    ]),
    # Units, versions, scales.
    (r"\d[ -]?[A-Za-zµμ]|[vV]\d|\.\d+\.", [
    (r"(?<![\w.,])(\d+ ?hr?s?) ?(\d+) ?m(?![\w/²³])|(?<![\w.,])(\d+h)([0-5]\d)(?!\w)",
     lambda match: f"{match[1] or match[3]} {match[2] or match[4]} min"),
    (r"(?<=\d ft )(\d+) ?in\b\.?", lambda match: f"{number(match[1])} inch{'' if match[1] == '1' else 'es'}"),
    (rf"(?<![\w.,])({_ND})[ -]?({_UNIT})(?![\w²³/°]|['’][a-z])", _unit),
    (r"(?<![\w.,])([248])K(?= (?!people|users|views|followers|subscribers|dollars|a\b)|[@).,;:!?]|$)|(?<![\w.,])(5|10)[kK](?= (?:run|race|walk))",
     lambda match: f"{english(int(match[1] or match[2]))} K"),
    (rf"(?<![\w.,])(?!0x)({_ND})x(?!\w)", lambda match: f"{number(match[1])} times"),
    (rf"(?<![\w.,])({_ND})([kKM])\+?(?![\w])", lambda match: f"{number(match[1])} {_SCALES[match[2].lower()]}"),
    (r"\b[vV](?=\d+\.\d)", "version "),
    (r"(?<![\d.])\d+(?:\.\d+){2,}(?!\d)", lambda match: " point ".join(number(part) for part in match[0].split("."))),
    ]),
    # Numbers in names, and all others.
    (r"\d", [
    (r"(?<=[A-Za-z])-(?=\d{1,4}\b(?![-.]\d))", " "),
    (r"(?<=[A-Za-z])\d+(?![\d.,]*\d)|(?<![\w.,])\d+(?=[A-Za-z])|(?<=[A-Za-z])\d+(?=[A-Za-z])", _attached),
    (r"(?<![\w.,])(?:1\d\d\d|20\d\d)(?![\w]|[.,]\d)", _year_or_number),
    (r"(?<![\w.,])\d{7,}(?![\w]|[.,]\d)", lambda match: english_digits(match[0])),
    (rf"(?<![\d.]){_ND}", lambda match: number(match[0])),
    ]),
)  # fmt: skip

_NEEDED = re.compile(r"[\d<>=≠≥≤≈±²³π√IVXL]")  # most texts have nothing that a rule could match


def read_english(text: str) -> str:
    """Return `text` with its numbers, signs, abbreviations and addresses in words."""
    if "." not in text or not ADDRESS.search(text):
        return _without_addresses(text)
    parts, end = list[str](), 0
    for found in ADDRESS.finditer(text):
        if (said := address(found[0])) != found[0]:
            parts += [_without_addresses(text[end : found.start()]), said]
            end = found.end()
    return "".join([*parts, _without_addresses(text[end:])])


def _without_addresses(text: str) -> str:
    text = words(text)
    return named(_read(text) if _NEEDED.search(text) else text)
