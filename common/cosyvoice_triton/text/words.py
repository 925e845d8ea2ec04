"""Words of a text that arrives in pieces."""

import re
from collections.abc import Callable, Sequence

from cosyvoice_triton.text.cleaning import strip_control_tokens

LONGEST_WORD = 64  # characters; of a longer one the beginning is not held back

# Where a token may end, whatever comes next. The official vocabulary has tokens of a mark and one character ("，在"),
# of two kanji and the kana after them ("気持ち"), and of a part of a Chinese character and up to two whole ones. So two
# characters are held back. Between kana no cut is certain: "ありがとうございました" is one token.
_HAN = r"[\u3400-\u4dbf\u4e00-\u9fff]"
_CUT = re.compile(rf"(?<=\S)(?= )|(?<=[。，！？、；：])(?=..)|(?<={_HAN})(?={_HAN}{{2}})")


class WordSplitter:
    """Gives the words that are complete, so that each is tokenized as in the whole text.

    Without control tokens and surplus whitespace; otherwise the text stays as it is written. ids: the tokenizer.
    """

    def __init__(self, ids: Callable[[str], Sequence[int]]) -> None:
        self._ids = ids
        self._rest = ""
        self._begun = False  # some text was given

    def push(self, piece: str) -> str:
        """Return the words that `piece` completes; "" if it completes no word."""
        self._rest = re.sub(r"\s+", " ", self._rest + piece)
        whole, places = list(self._ids(self._rest)), [match.start() for match in _CUT.finditer(self._rest)]
        cut = next((at for at in reversed(places) if self._apart(at) == whole), 0)
        cut = max(cut, len(self._rest) - LONGEST_WORD)
        part, self._rest = self._rest[:cut], self._rest[cut:]
        return self._cleaned(part)

    def finish(self) -> str:
        """Return the last word."""
        part, self._rest = self._rest, ""
        return self._cleaned(part)

    def _apart(self, at: int) -> list[int]:
        return [*self._ids(self._rest[:at]), *self._ids(self._rest[at:])]

    def _cleaned(self, part: str) -> str:
        part = re.sub(r" +", " ", strip_control_tokens(part)).rstrip()
        if not self._begun:
            part = part.lstrip()
        self._begun = self._begun or bool(part)
        return part
