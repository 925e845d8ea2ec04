"""Japanese: how quantities are said, in kanji, and the words around a number that say what it is."""

import re

from cosyvoice_triton.text.numbers import chinese_digits, is_spelled, japanese
from cosyvoice_triton.text.quantities import Quantity, Reader, is_day
from cosyvoice_triton.text.units import CURRENCIES, UNITS

_CODES = ("番号", "コード", "口座", "ID", "郵便", "内線")
_SCORED = ("スコア", "試合", "結果", "得点", "比率", "比")
_WON = ("で勝", "で負", "で敗", "の勝", "で引", "と", "で巨", "で", "の末")
_COUNTS = tuple("日 分 月 時 個 人 年 週 回 枚 本 歳 度 円 ページ 章 階 名 匹 冊 キロ 倍 割 点 万 センチ 号".split())
_SIGNS = {"-": "マイナス", "+": "プラス", "±": "プラスマイナス", "~": "約", "≈": "約"}
_OPERATIONS = {"+": "たす", "×": "かける", "÷": "わる", "=": "は"}


def number(digits: str) -> str:
    """Return the words of a whole or decimal number; of a longer one, and after a leading zero, its digits."""
    whole, _, decimals = digits.partition(".")
    words = chinese_digits(whole) if is_spelled(whole) else japanese(int(whole or 0))
    return words + (f"点{chinese_digits(decimals)}" if decimals else "")


class Japanese(Reader):
    """Reads Japanese."""

    scales = "[兆億万千]+"
    per_word = "(?=[\u3040-\u9fff])"
    money_end = "(?:円|ドル|ユーロ|ポンド|ウォン)?"

    def __init__(self) -> None:
        super().__init__("ja")

    def read(self, text: str) -> str:
        for sign, said in _OPERATIONS.items():
            if sign in text:
                text = re.sub(rf"(?<=\d)\s*[{sign}]\s*(?=\d)", said, text)
        return super().read(text)

    def amount(self, it: Quantity, before: str, after: str) -> str:
        sign = "".join(_SIGNS[mark] for mark in it.sign)
        if it.is_plain and len(it.digits) > 2 and before.rstrip(" はがの：:").endswith(_CODES):
            return chinese_digits(it.digits)
        name = CURRENCIES[it.currency].ja if it.currency else UNITS[it.unit].ja if it.unit in UNITS else "度" if it.unit else ""
        power = f"の{'マイナス' * (it.power[0] == '-')}{number(it.power.lstrip('-'))}乗" if it.power else ""
        per = f"毎{UNITS[it.per].ja.removesuffix('間') if it.per in UNITS else ''}" if it.per else ""
        return sign + number(it.digits) + power + it.scale + name + per

    def range(self, first: Quantity, last: Quantity, before: str, after: str, dash: str) -> str:
        scored = before.rstrip(" はがの：:").endswith(_SCORED) or (after.startswith(_WON) and dash in "-–")
        if first.is_plain and last.is_plain and scored and not after.startswith(_COUNTS):
            return f"{number(first.digits)}対{number(last.digits)}"
        if first.unit == last.unit and not first.sign:
            first = first._replace(unit="")
        return f"{self._said(first, before, '')}から{self._said(last, '', after)}"

    def date(self, it: Quantity, before: str, after: str) -> str:
        year, month, day = it.parts
        ended = "" if after.startswith("日") else "日"
        return (f"{number(year)}年" if year else "") + (f"{number(str(int(month)))}月" if month else "") + number(str(int(day))) + ended

    def clock(self, it: Quantity, before: str, after: str) -> str:
        hour, minute, second, half = it.parts
        said = {"a": "午前", "p": "午後"}.get(half[:1].lower(), "") + f"{number(str(int(hour)))}時"
        said += f"{number(str(int(minute)))}分" if minute.strip("0") else ""
        return said + (f"{number(second.lstrip('0'))}秒" if second.strip("0.") else "")

    def ratio(self, it: Quantity, before: str, after: str) -> str:
        return "対".join(map(number, it.parts))

    def slash(self, it: Quantity, before: str, after: str) -> str:
        whole, over, under = it.parts
        if is_day(it) and after.startswith(("（", "(", "に", "の", "は", "ま", "か", "、")):
            return self.date(Quantity("date", ("", over, under)), before, after)
        return (f"{number(whole)}と" if whole else "") + f"{number(under)}分の{number(over)}" + (UNITS[it.unit].ja if it.unit in UNITS else "")

    def code(self, it: Quantity, before: str, after: str) -> str:
        is_phone = max(map(len, it.parts)) > 2 or it.parts[0][0] in "0+"
        return "の".join(chinese_digits(part) if is_phone else number(part) for part in it.parts if part != "+")

    def version(self, it: Quantity, before: str, after: str) -> str:
        return "点".join(map(number, it.parts))

    def name(self, it: Quantity, before: str, after: str) -> str:
        return "点".join(map(number, it.digits.split(".")))


JAPANESE = Japanese()
