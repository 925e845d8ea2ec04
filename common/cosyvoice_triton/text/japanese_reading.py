"""What the Japanese grammar misreads: money, dates, telephone numbers, ranges and thousands."""

import re

from cosyvoice_triton.text.numbers import LONGEST, chinese_digits, japanese

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_SIGNS = {"¥": "円", "￥": "円", "$": "ドル", "€": "ユーロ", "£": "ポンド", "₩": "ウォン"}
_MONEY = re.compile(rf"([¥￥$€£₩])\s?({_NUMBER}(?:\.\d+)?[兆億万千]?)(?:円|ドル|ユーロ|ポンド|ウォン)?")
_PHONE = re.compile(r"(?<![\d-])\+?\d{2,5}-\d{1,4}-\d{3,4}(?![\d-])")
_DATE = re.compile(r"(?<!\d)(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})(?!\d)")
_MONTH_DAY = re.compile(r"(?<![\d/])(1[0-2]|[1-9])/([12]\d|3[01]|[1-9])(?![\d/])(?=[（(にのはまかを、])")
_TIME = re.compile(r"(?<!\d)([01]?\d|2[0-4]):([0-5]\d)(?!\d)")
_RANGE = re.compile(r"(?<=[\d時分円%％])\s?[〜～~–—―-]\s?(?=\d)")
_SCORE = re.compile(r"(?<!\d)(\d{1,2})[-–](\d{1,2})(?=(?:で|の勝|と))")
_FRACTION = re.compile(r"(?<![\d/])(\d{1,3})/(\d{1,3})(?![\d/])")
_DEGREES = re.compile(r"(\d)\s?(?:℃|°C)")
_NEGATIVE = re.compile(r"(?<![\dA-Za-z一-鿿ァ-ヺー])-(?=\d)")
_ID = re.compile(r"((?:番号|コード|暗証番号|口座|会員番号|ＩＤ|ID)(?:は|：|:|が|\s)?\s?)(\d{3,})")
_UNITS = {
    "km/h": "キロメートル毎時", "km": "キロメートル", "cm": "センチメートル", "mm": "ミリメートル", "m²": "平方メートル",
    "m2": "平方メートル", "kg": "キログラム", "mg": "ミリグラム", "ml": "ミリリットル", "mL": "ミリリットル", "GB": "ギガバイト",
    "MB": "メガバイト", "TB": "テラバイト", "kWh": "キロワット時", "m": "メートル", "g": "グラム", "L": "リットル", "%": "パーセント",
}  # fmt: skip
_UNIT = re.compile(rf"(?<=\d)\s?({'|'.join(_UNITS)})(?![A-Za-z])")
_DECIMAL = re.compile(rf"({_NUMBER})\.(\d+)(?!\.)")
_VERSION = re.compile(r"\d+(?:\.\d+){2,}")
_WHOLE = re.compile(_NUMBER)
_MATH = {"+": "たす", "×": "かける", "÷": "わる", "=": "は", "≥": "以上", "≤": "以下"}
_SIGN = re.compile(r"(?<=\d)\s*([+×÷=])\s*(?=\d)")


def read_japanese(text: str) -> str:
    """Return `text` with its numbers in kanji."""
    if not any(char.isdigit() for char in text):
        return text
    text = _MONEY.sub(lambda match: match[2] + _SIGNS[match[1]], text)
    text = _PHONE.sub(lambda match: "の".join(map(chinese_digits, match[0].strip("+").split("-"))), text)
    text = _ID.sub(lambda match: match[1] + chinese_digits(match[2]), text)
    text = _DATE.sub(lambda match: f"{match[1]}年{int(match[2])}月{int(match[3])}日", text)
    text = _MONTH_DAY.sub(r"\1月\2日", text)
    text = _TIME.sub(lambda match: f"{int(match[1])}時" + (f"{int(match[2])}分" if int(match[2]) else ""), text)
    text = _RANGE.sub("から", _SCORE.sub(r"\1対\2", text))
    text = _FRACTION.sub(lambda match: f"{match[2]}分の{match[1]}", text)
    text = _NEGATIVE.sub("マイナス", _DEGREES.sub(r"\1度", text))
    text = _SIGN.sub(lambda match: _MATH[match[1]], text)
    text = _UNIT.sub(lambda match: _UNITS[match[1]], text)
    text = _VERSION.sub(lambda match: "点".join(map(_in_kanji, match[0].split("."))), text)
    text = _DECIMAL.sub(lambda match: f"{_in_kanji(match[1])}点{chinese_digits(match[2])}", text)
    return _WHOLE.sub(lambda match: _in_kanji(match[0]), text)


def _in_kanji(digits: str) -> str:
    digits = digits.replace(",", "")
    spelled = len(digits) > LONGEST or (len(digits) > 1 and digits.startswith("0"))
    return chinese_digits(digits) if spelled else japanese(int(digits))
