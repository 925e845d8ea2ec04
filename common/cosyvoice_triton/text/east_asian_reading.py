"""Chinese, Japanese, and Korean for an LLM that does not read digits in it: how quantities are said."""

import re
from decimal import Decimal

from cosyvoice_triton.text.quantities import Around, Quantity, Reader

HAN, SINO = "零一二三四五六七八九", "영일이삼사오육칠팔구"
_NATIVE = ("", "한", "두", "세", "네", "다섯", "여섯", "일곱", "여덟", "아홉")
_NATIVE_TENS = ("", "열", "스물", "서른", "마흔", "쉰", "예순", "일흔", "여든", "아흔")

_DOTTED = re.compile(r"(?:1[0-2]|[1-9])\.(?:[12]\d|3[01]|[1-9])")  # a day after its month


class Chinese(Reader):
    """Reads Chinese."""

    def amount(self, it: Quantity, at: Around) -> str:
        if it.is_plain:
            return self.plain(it.digits, at)
        scale, sign, unit = it.scale, self.sign(it, at), it.unit
        if unit in ("%", "％", "‰"):
            share = self.unit_of(it)
            return f"{sign}{share[:3]}{'百' if it.digits == '100' else self.number(it.digits)}{scale}{share[3:]}"
        if power := {"k": 3, "m": 6, "b": 9, "w": 4}.get(scale[:1].lower(), 0):
            it, scale = it.but(number=f"{(Decimal(it.digits) * 10**power).normalize():f}"), ""
        elif it.currency:
            it = it.but(number=it.digits.removesuffix(".00"))
        two = it.digits == "2" and (it.unit or scale or (not it.sign and at("counted")))
        return sign + ("两" if two else self.powered(it)) + scale + self.unit_of(it)

    def plain(self, digits: str, at: Around) -> str:
        if self.is_code(digits, at):
            return self.spelled(digits)
        if at.before.endswith("第"):
            return chinese(int(digits), "二")
        return "两" if digits == "2" and at("counted") else self.number(digits)

    def range(self, first: Quantity, last: Quantity, at: Around, dash: str) -> str:
        is_date = (at("date") or at("alone")) and not at("counted")
        if is_date and all(_DOTTED.fullmatch(each.number) for each in (first, last)):
            first, last = (Quantity("date", month=each.groups[0], day=each.groups[1]) for each in (first, last))
        if first.is_plain and last.scale.isascii():
            first = first.but(scale=last.scale)
        return super().range(first, last, at, dash)

    def year(self, year: str) -> str:
        return self.spelled("20" * (len(year) == 2) + year)

    def clock(self, it: Quantity, at: Around) -> str:
        part, hour = "", int(it.hour)
        if it.half and not at("half"):
            part = "上午" if it.half[0] in "aA" else "晚上" if 5 < hour < 12 else "下午"
        if it.minute and not it.half and at("timed"):
            hours, minutes, seconds = (hour, it.minute, it.second) if it.second else (0, it.hour, it.minute)
            said = (self.hour(hours)[:-1] + "小时") * bool(hours) + chinese(int(minutes)) + "分"
            return said + (self.number(seconds.lstrip("0")) + "秒" if seconds.strip("0") else "")
        return part + super().clock(it.but(half=""), at)

    def hour(self, hour: int) -> str:
        return ("两" if hour == 2 else chinese(hour)) + "点"

    def name(self, it: Quantity, at: Around) -> str:
        """Read digits that touch Latin letters: a model or a train by its digits, a short one as a number."""
        whole, *parts = it.groups
        of_unit = re.match(r"[A-Za-z]{2}|(?a:[GMT]\b)|B ?[t模]", at.after) and not re.search(r"[A-Za-z_]\Z", at.before)
        is_spelled = len(whole) > 2 and (len(whole) > 5 or bool(parts) or not of_unit)
        said = self.spelled(whole) if is_spelled else self.number(whole)
        return "点".join([said, *map(self.spelled, parts)])


class Korean(Reader):
    """Reads Korean."""

    def said(self, it: Quantity, before: str, after: str) -> str:
        blank = re.match("[가-힣]", after) and not Around(self.words, before, after)("particle")
        return super().said(it, before, after).strip() + " " * bool(blank)

    def plain(self, digits: str, at: Around) -> str:
        return korean_count(int(digits), 13 if at("hour") else 100) if at("counted") else self.number(digits)

    def hour(self, hour: int) -> str:
        return korean_count(hour, 13) + self.say["hour"]


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


CHINESE, JAPANESE = Chinese("zh", chinese, HAN), Reader("ja", japanese, HAN)
KOREAN = Korean("ko", korean, "공일이삼사오육칠팔구")
