"""Words of a text that arrives in pieces."""

import re

from cosyvoice_triton.text.cleaning import strip_control_tokens

LONGEST_WORD = 64  # characters; of a longer one the beginning is not held back

# A tokenizer cuts before the space of the next word, and after a mark. It joins a few Chinese or Japanese characters.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_CUT = re.compile(rf"(?<=\S)(?= )|(?<=[。，！？、；：])|(?<=[{_CJK}])(?=[{_CJK}]{{4}})")


class WordSplitter:
    """Gives the words that are complete, so that each is tokenized as in the whole text.

    Without control tokens and surplus whitespace; otherwise the text stays as it is written.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._begun = False  # some text was given

    def push(self, piece: str) -> str:
        """Return the words that `piece` completes; "" if it completes no word."""
        self._rest = re.sub(r"\s+", " ", self._rest + piece)
        cut = max((match.start() for match in _CUT.finditer(self._rest)), default=0)
        cut = max(cut, len(self._rest) - LONGEST_WORD)
        part, self._rest = self._rest[:cut], self._rest[cut:]
        return self._cleaned(part)

    def finish(self) -> str:
        """Return the last word."""
        part, self._rest = self._rest, ""
        return self._cleaned(part)

    def _cleaned(self, part: str) -> str:
        part = re.sub(r" +", " ", strip_control_tokens(part)).rstrip()
        if not self._begun:
            part = part.lstrip()
        self._begun = self._begun or bool(part)
        return part
