"""Japanese: how quantities are said, in kanji, and the words around a number that say what it is."""

import re

from cosyvoice_triton.text.numbers import chinese_digits, japanese
from cosyvoice_triton.text.quantities import Quantity, Reader, is_day

_CODES = ("番号", "コード", "口座", "ID", "郵便", "内線")  # before digits that are said one by one
_SCORED = ("スコア", "試合", "結果", "得点", "比率", "比")  # before, and after, two numbers of a score
_WON = re.compile("で|の勝|と|の末")
_COUNTS = re.compile("[日分月時個人年週回枚本歳度円章階名匹冊倍割点万号]|ページ|キロ|センチ")


class Japanese(Reader):
    """Reads Japanese."""

    language = "ja"
    whole, spelled = staticmethod(japanese), staticmethod(chinese_digits)
    rules = [("[〜～~–+×÷=-]", [
        (r"(?<=\d[日月時分年円人%])\s?[〜～~–-]\s?(?=\d)", "から"), (r"(?<=\d)\s*\+\s*(?=\d)", "たす"),
        (r"(?<=\d)\s*×\s*(?=\d)", "かける"), (r"(?<=\d)\s*÷\s*(?=\d)", "わる"), (r"(?<=\d)\s*=\s*(?=\d)", "は"),
    ])]  # fmt: skip
    scales = "[兆億万千]+"
    per_word = plain_per_word = "(?=[\u3040-\u9fff])"
    money_end = "(?:円|ドル|ユーロ|ポンド|ウォン)?"
    signs = {"-": "マイナス", "+": "プラス", "±": "プラスマイナス", "~": "約", "≈": "約"}
    halves = {"a": "午前", "p": "午後"}
    point, to, ratio_to, over, grouped, per = "点", "から", "対", "分の", "の", "毎"
    year, month, day, hour, minute, second, degree, power = "年", "月", "日", "時", "分", "秒", "度", "の{}乗"

    def amount(self, it: Quantity, before: str, after: str) -> str:
        if it.is_plain and len(it.digits) > 2 and before.rstrip(" はがの：:").endswith(_CODES):
            return chinese_digits(it.digits)
        return super().amount(it, before, after).replace("毎時間", "毎時")

    def range(self, first: Quantity, last: Quantity, before: str, after: str, dash: str) -> str:
        scored = before.rstrip(" はがの：:").endswith(_SCORED) or (dash in "-–" and _WON.match(after))
        if first.is_plain and last.is_plain and scored and not _COUNTS.match(after):
            return self.ratio(Quantity("ratio", (first.digits, last.digits)), before, after)
        return super().range(first, last, before, after, dash)

    def slash(self, it: Quantity, before: str, after: str) -> str:
        if is_day(it) and re.match("[（(にのはまか、]", after):
            return self.date(Quantity("date", ("", *it.parts[1:])), before, after)
        return (f"{self.number(it.parts[0])}と" if it.parts[0] else "") + super().slash(it, before, after)

    def code(self, it: Quantity, before: str, after: str) -> str:
        is_address = max(map(len, it.parts)) < 3 and it.parts[0][0] not in "0+"
        return "の".join(map(self.number, it.parts)) if is_address else super().code(it, before, after)


JAPANESE = Japanese()
