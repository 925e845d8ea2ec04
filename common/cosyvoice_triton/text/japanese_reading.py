"""Japanese: how quantities are said, in kanji, and what the words around a number say that it is."""

from cosyvoice_triton.text.numbers import chinese_digits, japanese
from cosyvoice_triton.text.quantities import Around, Quantity, Reader


class Japanese(Reader):
    """Reads Japanese."""

    language = "ja"
    whole, spelled = staticmethod(japanese), staticmethod(chinese_digits)

    def unit_of(self, it: Quantity) -> str:
        return super().unit_of(it).replace("毎時間", "毎時")

    def code(self, it: Quantity, at: Around) -> str:
        is_address = max(map(len, it.parts)) < 3 and it.parts[0][0] != "0" and not it.sign
        return "の".join(map(self.number, it.parts)) if is_address else super().code(it, at)


JAPANESE = Japanese()
