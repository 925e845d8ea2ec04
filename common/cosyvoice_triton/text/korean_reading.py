"""Korean numbers as words, for an LLM that does not read digits in Korean."""

import re

from cosyvoice_triton.text.numbers import LONGEST, korean, korean_count, korean_digits

_COUNTED = "개|명|시(?![가-힣]*간대)|시간|살|마리|권|잔|병|대|번(?!지|호)|장|그루|송이|켤레|벌|사람|가지|달"
_UNITS = {
    "km/h": "킬로미터 매시", "km": "킬로미터", "kg": "킬로그램", "cm": "센티미터", "mm": "밀리미터", "mL": "밀리리터", "ml": "밀리리터",
    "GB": "기가바이트", "MB": "메가바이트", "TB": "테라바이트", "℃": "도", "°C": "도", "%": "퍼센트", "m": "미터", "g": "그램", "L": "리터",
}  # fmt: skip
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_PHONE = re.compile(r"(?<![\d-])\d{2,4}-\d{3,4}(?:-\d{4})?(?![\d-])")
_MONEY = re.compile(rf"([₩$€£])\s?({_NUMBER}(?:\.\d+)?)(만|억|천)?")
_MONEY_NAMES = {"₩": "원", "$": "달러", "€": "유로", "£": "파운드"}
_TIME = re.compile(r"(?<!\d)(\d{1,2}):(\d\d)(?!\d)")
_DATE = re.compile(r"(?<!\d)(\d{4})[-./](\d{1,2})[-./](\d{1,2})(?!\d)")
_MONTH = re.compile(r"(?<!\d)(\d{1,2})월")
_RANGE = re.compile(r"(?<=\d)\s?[~〜～–](?=\s?\d)|(?<=\d)-(?=\d)")
_NEGATIVE = re.compile(r"(?<![\w\d])-(?=\d+(?:\.\d+)?\s?(?:℃|°C|도))")
_MINUS = re.compile(r"(?<![\w\d])-(?=\d)")
_COUNT = re.compile(rf"(?<![\d.,])(\d{{1,2}})\s?(?=(?:{_COUNTED}))")
_UNIT = re.compile(rf"(?<=\d)\s?({'|'.join(_UNITS)})(?![A-Za-z])")
_DECIMAL = re.compile(rf"({_NUMBER})\.(\d+)")
_PLAIN = re.compile(rf"{_NUMBER}(?=(\s?[가-힣])?)")


def read_korean(text: str) -> str:
    """Return `text` with its numbers in Korean words."""
    if not any(char.isdigit() for char in text):
        return text
    text = _PHONE.sub(lambda match: ", ".join(map(korean_digits, match[0].split("-"))), text)
    text = _MONEY.sub(lambda match: f"{match[2]}{match[3] or ''} {_MONEY_NAMES[match[1]]}", text)
    text = _DATE.sub(r"\1년 \2월 \3일", text)
    text = _TIME.sub(lambda match: f"{match[1]}시" + (f" {int(match[2])}분" if int(match[2]) else ""), text)
    text = _RANGE.sub("에서 ", text)
    text = _MINUS.sub("마이너스 ", _NEGATIVE.sub("영하 ", text))
    text = _MONTH.sub(lambda match: f"{ {6: '유', 10: '시'}.get(int(match[1])) or korean(int(match[1])) } 월", text)
    text = _COUNT.sub(lambda match: f"{_hour_or_count(match)} ", text)
    text = _UNIT.sub(lambda match: f" {_UNITS[match[1]]}", text)
    text = _DECIMAL.sub(lambda match: f"{_whole(match[1])} 점 {korean_digits(match[2]).replace('공', '영')} ", text)
    return re.sub(r"  +", " ", _PLAIN.sub(lambda match: _whole(match[0]) + (" " if match[1] else ""), text))


def _hour_or_count(match: re.Match[str]) -> str:
    number = int(match[1])
    of_day = match.string[match.end() :].startswith("시") and not match.string[match.end() :].startswith("시간")
    return korean(number) if not number or (of_day and number > 12) else korean_count(number)


def _whole(digits: str) -> str:
    digits = digits.replace(",", "")
    spelled = len(digits) > LONGEST or (len(digits) > 1 and digits.startswith("0"))
    return korean_digits(digits) if spelled else korean(int(digits))
