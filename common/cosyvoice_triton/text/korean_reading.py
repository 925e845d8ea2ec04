"""Korean: how quantities are said, for an LLM that does not read digits in Korean."""

import re

from cosyvoice_triton.text.numbers import korean, korean_count, korean_digits
from cosyvoice_triton.text.quantities import Around, Quantity, Reader

_MONTHS = {6: "유", 10: "시"}  # that are not said as the number


class Korean(Reader):
    """Reads Korean."""

    language = "ko"
    whole, spelled = staticmethod(korean), staticmethod(korean_digits)
    scales = "[조억만천백]+"
    money_end = "(?:원|달러|유로|파운드)?"
    parted = frozenset(range(32))
    signs = {"-": "마이너스 ", "+": "플러스 ", "±": "플러스마이너스 ", "~": "약 ", "≈": "약 "}
    halves = {"a": "오전 ", "p": "오후 "}
    point, to, ratio_to, over, grouped, per = " 점 ", "에서 ", " 대 ", "분의 ", ", ", " 매 "
    year, month, day, hour, minute, second, degree = " 년 ", " 월 ", " 일", " 시 ", " 분 ", " 초", "도"
    power = "의 {}제곱"

    def decimals(self, digits: str) -> str:
        return korean_digits(digits, "영")

    def say(self, it: Quantity, at: Around) -> str:
        blank = re.match("[가-힣]", at.after) and not at("particle") and not it.currency + it.unit and it.kind != "code"
        return super().say(it, at).strip() + (" " if blank else "")

    def amount(self, it: Quantity, at: Around) -> str:
        if it.is_plain:
            return self.plain(it.digits, at)
        cold = it.sign == "-" and (it.unit[:1] in tuple("°℃℉") or at.after.startswith("도"))
        scale, name = (f" {each}" if each else "" for each in (it.scale, self.unit_of(it)))
        return ("영하 " if cold else self.sign(it)) + self.powered(it) + scale + name

    def plain(self, digits: str, at: Around) -> str:
        if len(digits) < 3 and at("counted"):
            return _counted(int(digits), at("hour"))
        return (
            _MONTHS.get(int(digits), "")
            if at.after.startswith("월") and int(digits) in _MONTHS
            else self.number(digits)
        )

    def range(self, first: Quantity, last: Quantity, at: Around, dash: str) -> str:
        if first.is_plain and at("counted"):
            return f"{_counted(int(first.digits), False)}에서 {self.said(last, '', at.after)}"
        return super().range(first, last, at, dash)

    def date(self, it: Quantity, at: Around) -> str:
        month = int(it.parts[1] or 0)
        said = super().date(it, at)
        return said.replace(f"{korean(month)} 월", f"{_MONTHS[month]} 월") if month in _MONTHS else said

    def clock(self, it: Quantity, at: Around) -> str:
        hour = int(it.parts[0])
        return super().clock(it, at).replace(f"{korean(hour)} 시", f"{_counted(hour, True)} 시")


def _counted(number: int, hour: bool) -> str:
    """Return a number of things, or an hour."""
    return korean_count(number) if 0 < number < (13 if hour else 100) else korean(number)


KOREAN = Korean()
