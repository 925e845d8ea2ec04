"""Korean: how quantities are said, for an LLM that does not read digits in Korean."""

import re

from cosyvoice_triton.text.numbers import korean, korean_count, korean_digits
from cosyvoice_triton.text.quantities import Quantity, Reader

# What follows a number that is said with native words, and a particle, which has no blank before it.
_COUNTED = re.compile(
    r"\s?(?:개|명|시(?![가-힣]*간대)|살|마리|권|잔|병|대|번(?!지|호|째|\s?(?:버스|출구|문제|홈|트랙|게이트))|장|그루|송이|켤레|벌|사람|가지|달)"
)
_HOUR = re.compile(r"\s?시(?!간)")
_PARTICLE = re.compile("(?:으?로|은|는|이|가|을|를|와|과|의|에|도|다|까지|부터|쯤|만|입|예)(?![월일년시분])")
_MONTHS = {6: "유", 10: "시"}  # that are not said as the number


class Korean(Reader):
    """Reads Korean."""

    language = "ko"
    whole, spelled = staticmethod(korean), staticmethod(korean_digits)
    scales = "[조억만천백]+"
    money_end = "(?:원|달러|유로|파운드)?"
    signs = {"-": "마이너스 ", "+": "플러스 ", "±": "플러스마이너스 ", "~": "약 ", "≈": "약 "}
    halves = {"a": "오전 ", "p": "오후 "}
    point, to, ratio_to, over, grouped, per = " 점 ", "에서 ", " 대 ", "분의 ", ", ", " 매 "
    year, month, day, hour, minute, second, degree, power = (
        " 년 ",
        " 월 ",
        " 일",
        " 시 ",
        " 분 ",
        " 초",
        "도",
        "의 {}제곱",
    )

    def decimals(self, digits: str) -> str:
        return korean_digits(digits, "영")

    def said(self, it: Quantity, before: str, after: str) -> str:
        said = super().said(it, before, after).strip()
        blank = (
            re.match("[가-힣]", after)
            and not _PARTICLE.match(after)
            and not it.currency + it.unit
            and it.kind != "code"
        )
        return said + (" " if blank else "")

    def amount(self, it: Quantity, before: str, after: str) -> str:
        if it.is_plain and len(it.digits) < 3 and _COUNTED.match(after):
            return self.counted(int(it.digits), bool(_HOUR.match(after)))
        if it.is_plain and after.startswith("월") and int(it.digits) in _MONTHS:
            return _MONTHS[int(it.digits)]
        cold = it.sign == "-" and (it.unit[:1] in tuple("°℃℉") or after.startswith("도"))
        scale, name = (f" {each}" if each else "" for each in (it.scale, self.unit_of(it)))
        return ("영하 " if cold else self.sign(it)) + self.powered(it) + scale + name

    def counted(self, number: int, hour: bool) -> str:
        """Return a number of things, or an hour."""
        return korean(number) if not 0 < number < (13 if hour else 100) else korean_count(number)

    def range(self, first: Quantity, last: Quantity, before: str, after: str, dash: str) -> str:
        if first.is_plain and last.is_plain and dash == "-" and re.match("으?로", after):
            return self.ratio(Quantity("ratio", (first.digits, last.digits)), before, after)
        if first.is_plain and _COUNTED.match(after):
            return f"{self.counted(int(first.digits), False)}에서 {self.said(last, '', after)}"
        return super().range(first, last, before, after, dash)

    def date(self, it: Quantity, before: str, after: str) -> str:
        month = int(it.parts[1] or 0)
        said = super().date(it, before, after)
        return said.replace(f"{korean(month)} 월", f"{_MONTHS[month]} 월") if month in _MONTHS else said

    def clock(self, it: Quantity, before: str, after: str) -> str:
        hour = int(it.parts[0])
        return super().clock(it, before, after).replace(f"{korean(hour)} 시", f"{self.counted(hour, True)} 시")


KOREAN = Korean()
