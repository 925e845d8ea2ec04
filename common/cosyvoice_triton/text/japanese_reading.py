"""Japanese: how quantities are said, in kanji, and what the words around a number say that it is."""

from cosyvoice_triton.text.numbers import chinese_digits, japanese
from cosyvoice_triton.text.quantities import Around, Quantity, Reader


class Japanese(Reader):
    """Reads Japanese."""

    language = "ja"
    whole, spelled = staticmethod(japanese), staticmethod(chinese_digits)
    scales = "[兆億万千]+"
    per_word = plain_per_word = "(?=[\u3040-\u9fff])"
    money_end = "(?:円|ドル|ユーロ|ポンド|ウォン)?"
    parted = frozenset(range(32))
    signs = {"-": "マイナス", "+": "プラス", "±": "プラスマイナス", "~": "約", "≈": "約"}
    halves = {"a": "午前", "p": "午後"}
    point, to, ratio_to, over, mixed, grouped, per = "点", "から", "対", "分の", "と", "の", "毎"
    year, month, day, hour, minute, second, degree, power = "年", "月", "日", "時", "分", "秒", "度", "の{}乗"

    def unit_of(self, it: Quantity) -> str:
        return super().unit_of(it).replace("毎時間", "毎時")

    def code(self, it: Quantity, at: Around) -> str:
        is_address = max(map(len, it.parts)) < 3 and it.parts[0][0] not in "0+"
        return "の".join(map(self.number, it.parts)) if is_address else super().code(it, at)


JAPANESE = Japanese()
