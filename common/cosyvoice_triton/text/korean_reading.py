"""Korean: how quantities are said, for an LLM that does not read digits in Korean."""

import re

from cosyvoice_triton.text.numbers import korean, korean_count, korean_digits
from cosyvoice_triton.text.quantities import Around, Quantity, Reader

_MONTHS = {6: "유", 10: "시"}  # that are not said as the number


class Korean(Reader):
    """Reads Korean."""

    language = "ko"
    whole, spelled = staticmethod(korean), staticmethod(korean_digits)

    def decimals(self, digits: str) -> str:
        return korean_digits(digits, "영")

    def said(self, it: Quantity, before: str, after: str) -> str:
        particle = Around(self.words, before, after)("particle")
        blank = re.match("[가-힣]", after) and not particle and not it.currency + it.unit and it.kind != "code"
        return super().said(it, before, after).strip() + (" " if blank else "")

    def amount(self, it: Quantity, at: Around) -> str:
        if it.is_plain:
            return self.plain(it.digits, at)
        cold = it.is_cold or (it.sign == "-" and at.after.startswith("도"))
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

    def month(self, month: int) -> str:
        return _MONTHS.get(month, korean(month)) + self.say["month"]

    def hour(self, hour: int) -> str:
        return _counted(hour, True) + self.say["hour"]


def _counted(number: int, hour: bool) -> str:
    """Return a number of things, or an hour."""
    return korean_count(number) if 0 < number < (13 if hour else 100) else korean(number)


KOREAN = Korean()
