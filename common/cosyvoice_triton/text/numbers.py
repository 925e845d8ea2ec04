"""Numbers in the words of four languages."""

from unicodedata import normalize

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()
_SCALES = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))
_ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"}
_ORDINALS |= {"twelve": "twelfth"}
HAN, SINO = "零一二三四五六七八九", "영일이삼사오육칠팔구"
_NATIVE = ("", "한", "두", "세", "네", "다섯", "여섯", "일곱", "여덟", "아홉")
_NATIVE_TENS = ("", "열", "스물", "서른", "마흔", "쉰", "예순", "일흔", "여든", "아흔")

ROMAN = r"(?=[IVXL])(?:XL|L?X{0,3})(?:IX|IV|V?I{0,3})"  # a pattern


def roman(letters: str) -> int:
    """Return the value of a Roman numeral, which may be one character."""
    values = [{"I": 1, "V": 5, "X": 10, "L": 50}[letter] for letter in normalize("NFKC", letters)]
    return sum(-value if value < max(values[index:]) else value for index, value in enumerate(values))


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
    last = _ORDINALS.get(last) or (last[:-1] + "ieth" if last.endswith("y") else last + "th")
    return f"{before} {last}".strip()


def english_year(year: int) -> str:
    """Return a year as it is said: "nineteen oh five", "two thousand eight", "twenty ten"."""
    century, rest = divmod(year, 100)
    if year < 1010 or (century % 10 == 0 and rest < 10):
        return english(year)
    return f"{english(century)} {'hundred' if not rest else 'oh ' * (rest < 10) + english(rest)}"


def chinese(number: int, two: str = "两") -> str:
    """Return a number of at least 0 in Chinese characters; `two`: before hundreds and above."""
    return _by_places(number, HAN, "十百千", ("", "万", "亿", "万"), two) or "零"


def japanese(number: int) -> str:
    """Return a number of at least 0 in kanji, as it is said in Japanese: 千 and 百 without 一."""
    return _by_places(number, HAN, "十百千", ("", "万", "億", "兆")) or "零"


def korean(number: int) -> str:
    """Return a number of at least 0 in Sino-Korean words."""
    words = _by_places(number, SINO, "십백천", ("", "만", "억", "조")) or "영"
    return words.removeprefix("일") if words.startswith("일만") else words


def _by_places(number: int, digits: str, units: str, myriads: tuple[str, ...], two: str = "") -> str:
    """Return a number by groups of four digits; "" for 0. With `two` as in Chinese: a one and a gap are said."""
    words, gap, written = "", False, str(number)
    for place, char in zip(range(len(written))[::-1], written, strict=True):
        unit, group = place % 4, number // 10 ** (place - place % 4) % 10**4
        if char == "0":
            gap = gap or bool(words)
        else:
            words += digits[0] * (gap and bool(two))
            if char == "2" and (unit > 1 or (group == 2 and place)):
                words += two or digits[2]
            elif char != "1" or not unit or (two and (unit > 1 or words)):
                words += digits[int(char)]
            words, gap = words + ("", *units)[unit], False
        if not unit and (group or (place == 8 and two and number >= 10**12)):
            words, gap = words + myriads[place // 4], False
    return words


def korean_count(number: int, limit: int) -> str:
    """Return a number as it counts things, 세 for 3, below `limit`, which is at most 100."""
    if not 0 < number < limit:
        return korean(number)
    return "스무" if number == 20 else _NATIVE_TENS[number // 10] + _NATIVE[number % 10]
