"""Sentences of a text that arrives in pieces."""

import re
from collections.abc import Iterator

from cosyvoice_triton.text.english_words import BEFORE_NUMBERS

# sentencex takes quadratic to cubic time for quotation marks that are never closed, and holds the GIL: 7 to 30 s for
# 65,000 characters, at most 3 ms for these.
WINDOW = 512
_UNDECIDED = 32  # last characters of a window: what follows them may still join two sentences, as after "Dr."
# An abbreviation that sentencex takes for an end, before its number. After a number it is a unit, as in "5 sec.".
_BEFORE_NUMBER = re.compile(rf"(?<!\d )\b(?:{'|'.join(BEFORE_NUMBERS)})\.\s+\Z")


def _with_numbers(complete: list[str], last: str) -> tuple[list[str], str]:
    """Join a sentence that ends with "Apt." and one that begins with a digit."""
    joined = list[str]()
    for part in (*complete, last):
        if joined and part[:1].isdigit() and _BEFORE_NUMBER.search(joined[-1]):
            part = joined.pop() + part
        joined.append(part)
    return joined[:-1], joined[-1]


class SentenceSplitter:
    """Splits where sentencex does, in linear time.

    A sentence is complete once the next one has begun. In sentences longer than half a WINDOW, a quotation or an
    abbreviation that lies across the middle of a window may be split.
    """

    def __init__(self) -> None:
        self._begin = ""  # of the unfinished sentence: no end in it
        self._rest = ""  # after _begin, at most a WINDOW

    @property
    def unfinished(self) -> str:
        """Return the text after the last complete sentence."""
        return self._begin + self._rest

    def push(self, text: str) -> Iterator[str]:
        """Yield the sentences that `text` completes, with their trailing whitespace."""
        from sentencex import segment  # here: LLM servers import this package only to count tokens

        text, position = self._rest + text, 0
        while True:
            window = text[position : position + WINDOW]
            cut = position + WINDOW < len(text)
            *complete, last = segment("en", window) or [""]
            complete, last = _with_numbers(complete, last)
            while cut and complete and len(last) < _UNDECIDED:
                last = complete.pop() + last
            for sentence in complete:
                yield self._begin + sentence
                self._begin = ""
            if not cut:
                self._rest = last
                return
            used = len(window) - len(last)
            if used < WINDOW // 2:  # otherwise most of the window would be split again and again
                self._begin += window[used : WINDOW // 2]
                used = WINDOW // 2
            position += used

    def finish(self) -> str:
        """Return the text after the last complete sentence, which is discarded here."""
        rest, self._begin, self._rest = self.unfinished, "", ""
        return rest
