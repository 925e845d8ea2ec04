"""Numbers in the words of four languages."""

LONGEST = 15  # digits of what is read as a number; a longer one is read digit by digit

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()
_SCALES = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))
_ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"}
_ORDINALS |= {"twelve": "twelfth"}
_HAN = "零一二三四五六七八九"
_SINO = "영일이삼사오육칠팔구"
_NATIVE = ("", "한", "두", "세", "네", "다섯", "여섯", "일곱", "여덟", "아홉")
_NATIVE_TENS = ("", "열", "스물", "서른", "마흔", "쉰", "예순", "일흔", "여든", "아흔")


ROMAN = r"(?=[IVXL])(?:XL|L?X{0,3})(?:IX|IV|V?I{0,3})"  # a pattern
_ROMAN_VALUES = {"I": 1, "V": 5, "X": 10, "L": 50}


def roman(letters: str) -> int:
    """Return the value of a Roman numeral."""
    values = [_ROMAN_VALUES[letter] for letter in letters]
    return sum(-value if value < max(values[index:]) else value for index, value in enumerate(values))


def is_spelled(digits: str) -> bool:
    """Return whether a whole number is said digit by digit: after a leading zero, or because it is very long."""
    return len(digits) > LONGEST or (len(digits) > 1 and digits[0] == "0")


def english(number: int) -> str:
    """Return a number of at least 0 in English words."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens] + (f" {_ONES[ones]}" if ones else "")
    scale, name = next(each for each in _SCALES if number >= each[0])
    count, rest = divmod(number, scale)
    return f"{english(count)} {name}" + (f" {english(rest)}" if rest else "")


def english_ordinal(number: int) -> str:
    """Return "first" for 1."""
    before, _, last = english(number).rpartition(" ")
    last = _ORDINALS.get(last) or (last[:-1] + "ieth" if last.endswith("y") else last + "th")
    return f"{before} {last}".strip()


def english_year(year: int) -> str:
    """Return a year of four digits as it is said: "nineteen oh five", "two thousand eight", "twenty ten"."""
    century, rest = divmod(year, 100)
    if century % 10 == 0 and rest < 10:
        return english(year)
    if not rest:
        return f"{english(century)} hundred"
    return f"{english(century)} {'oh ' if rest < 10 else ''}{english(rest)}"


def english_digits(digits: str, zero: str = "zero") -> str:
    """Return the digits of `digits` one by one."""
    return " ".join(zero if char == "0" else _ONES[int(char)] for char in digits if char in "0123456789")


def chinese(number: int, two: str = "两") -> str:
    """Return a number of at least 0 in Chinese characters; `two`: before hundreds and above."""
    if number < 10:
        return _HAN[number]
    for scale, name in ((10**8, "亿"), (10**4, "万")):
        if number >= scale:
            count, rest = divmod(number, scale)
            head = two if count == 2 else chinese(count, two)
            gap = "零" if rest and rest < scale // 10 else ""
            return f"{head}{name}{gap}{_below(rest, two) if rest else ''}"
    return _below(number, two)


def _below(number: int, two: str) -> str:
    """Return a number after a greater unit, where ten is 一十."""
    if number >= 10**4:
        return chinese(number, two)
    words, gap = "", False
    for scale, name in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit, number = divmod(number, scale)
        if digit:
            words += ("零" if gap else "") + (two if digit == 2 and scale >= 100 else _HAN[digit]) + name
        gap = not digit and bool(words)
    return words.removeprefix("一") if words.startswith("一十") else words


def chinese_digits(digits: str) -> str:
    """Return the digits one by one."""
    return "".join(_HAN[int(char)] for char in digits if char in "0123456789")


def japanese(number: int) -> str:
    """Return a number of at least 0 in kanji, as it is said in Japanese: 千 and 百 without 一."""
    return _by_myriads(number, "兆億万", "千百十", _HAN) or "零"


def korean(number: int) -> str:
    """Return a number of at least 0 in Sino-Korean words."""
    words = _by_myriads(number, "조억만", "천백십", _SINO) or "영"
    return words.removeprefix("일") if words.startswith("일만") else words


def _by_myriads(number: int, myriads: str, units: str, digits: str) -> str:
    """Return a number in groups of four digits, with a one only before a myriad and as the last digit; "" for 0."""
    words = ""
    for scale, name in zip((10**12, 10**8, 10**4, 1), (*myriads, ""), strict=True):
        count, number = divmod(number, scale)
        for unit, mark in zip((1000, 100, 10, 1), (*units, ""), strict=True):
            if digit := count // unit % 10:
                words += (digits[digit] if digit > 1 or unit == 1 else "") + mark
        words += name if count else ""
    return words


def korean_count(number: int) -> str:
    """Return a number below 100 as it counts things: 세 for 3."""
    tens, ones = divmod(number, 10)
    return "스무" if number == 20 else _NATIVE_TENS[tens] + _NATIVE[ones]


def korean_digits(digits: str, zero: str = "공") -> str:
    """Return the digits one by one, as in a telephone number."""
    return "".join(zero if char == "0" else _SINO[int(char)] for char in digits if char in "0123456789")
