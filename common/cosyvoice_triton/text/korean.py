"""Korean: how quantities are said, for an LLM that does not read digits in Korean."""

import re

from cosyvoice_triton.text.numbers import is_spelled, korean, korean_count, korean_digits
from cosyvoice_triton.text.quantities import Quantity, Reader
from cosyvoice_triton.text.units import CURRENCIES, UNITS

# What follows a number that is said with native words, and a particle, which has no blank before it.
_COUNTED = re.compile(r"\s?(?:개|명|시(?![가-힣]*간대)|살|마리|권|잔|병|대|번(?!지|호)|장|그루|송이|켤레|벌|사람|가지|달)")
_PARTICLE = re.compile("(?:으?로|은|는|이|가|을|를|와|과|의|에|도|다|까지|부터|쯤|만)(?![월일년시분])")
_SIGNS = {"-": "마이너스 ", "+": "플러스 ", "±": "플러스마이너스 ", "~": "약 ", "≈": "약 "}


def number(digits: str) -> str:
    """Return the words of a whole or decimal number; of a longer one, and after a leading zero, its digits."""
    whole, _, decimals = digits.partition(".")
    words = korean_digits(whole) if is_spelled(whole) else korean(int(whole or 0))
    return words + (f" 점 {korean_digits(decimals, '영')}" if decimals else "")


def _apart(said: str, after: str) -> str:
    """Return `said`, with a blank before a word that follows it."""
    return said + (" " if re.match("[가-힣]", after) and not _PARTICLE.match(after) else "")


class Korean(Reader):
    """Reads Korean."""

    scales = "[조억만천백]+"
    money_end = "(?:원|달러|유로|파운드)?"

    def __init__(self) -> None:
        super().__init__("ko")

    def amount(self, it: Quantity, before: str, after: str) -> str:
        sign = "".join(_SIGNS[mark] for mark in it.sign)
        if it.sign == "-" and (it.unit[:1] in tuple("°℃℉") or after.startswith("도")):
            sign = "영하 "
        if it.is_plain and len(it.digits) < 3 and _COUNTED.match(after):
            hour = after.lstrip()[:1] == "시" and not after.lstrip().startswith("시간")
            value = int(it.digits)
            return _apart(korean(value) if not value or (hour and value > 12) else korean_count(value), after)
        if after.startswith("월") and it.is_plain and it.digits in ("6", "10"):
            return {"6": "유", "10": "시"}[it.digits] + " "
        name = CURRENCIES[it.currency].ko if it.currency else UNITS[it.unit].ko if it.unit in UNITS else "도" if it.unit else ""
        power = f"의 {'마이너스 ' * (it.power[0] == '-')}{number(it.power.lstrip('-'))}제곱" if it.power else ""
        per = f" 매 {UNITS[it.per].ko}" if it.per in UNITS else ""
        said = sign + number(it.digits) + power + (f" {it.scale}" if it.scale else "")
        return f"{said} {name}{per}" if name else _apart(said, after)

    def range(self, first: Quantity, last: Quantity, before: str, after: str, dash: str) -> str:
        if first.unit == last.unit and not first.sign:
            first = first._replace(unit="")
        begin = self._said(first, before, after if first.is_plain and _COUNTED.match(after) else "")
        return f"{begin.strip()}에서 {self._said(last, '', after)}"

    def date(self, it: Quantity, before: str, after: str) -> str:
        year, month, day = it.parts
        said = {6: "유", 10: "시"}.get(int(month or 0)) or (korean(int(month)) if month else "")
        return (f"{number(year)} 년 " if year else "") + (f"{said} 월 " if said else "") + f"{korean(int(day))} 일"

    def clock(self, it: Quantity, before: str, after: str) -> str:
        hour, minute, second, half = it.parts
        said = {"a": "오전 ", "p": "오후 "}.get(half[:1].lower(), "")
        said += f"{korean_count(int(hour)) if 0 < int(hour) < 13 else korean(int(hour))} 시"
        said += f" {korean(int(minute))} 분" if minute.strip("0") else ""
        return said + (f" {number(second.lstrip('0'))} 초" if second.strip("0.") else "")

    def ratio(self, it: Quantity, before: str, after: str) -> str:
        return _apart(" 대 ".join(map(number, it.parts)), after)

    def slash(self, it: Quantity, before: str, after: str) -> str:
        whole, over, under = it.parts
        said = (f"{number(whole)}과 " if whole else "") + f"{number(under)}분의 {number(over)}"
        return _apart(said + (f" {UNITS[it.unit].ko}" if it.unit in UNITS else ""), after)

    def code(self, it: Quantity, before: str, after: str) -> str:
        return ", ".join(map(korean_digits, it.parts))

    def version(self, it: Quantity, before: str, after: str) -> str:
        return _apart(" 점 ".join(map(number, it.parts)), after)

    def name(self, it: Quantity, before: str, after: str) -> str:
        return _apart(" 점 ".join(map(number, it.digits.split("."))), after)


KOREAN = Korean()
