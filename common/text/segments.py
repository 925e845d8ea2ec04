"""Sentences, and how many of them make a segment: what the LLM is given to speak at a time.

A segment is long enough to be spoken with one intonation and short enough for the audio that one request to the LLM
may make. Cuts are made where a reader would breathe: between sentences, else clauses, else words.
"""

import re
from collections.abc import Callable, Iterable, Iterator

from common.text.cleaning import is_speakable

# Tokens of text, CosyVoice2's own figures. 25 speech tokens a second at about 4 words make 6 or 7 of each, so that a
# full segment lasts some 22 s.
SEGMENT_TOKENS = 80
LEAST_TOKENS = 20  # a shorter rest joins the segment before it

CountTokens = Callable[[str], int]

# Ends of clauses. The marks of Western writing end one before a blank only: "1,000" and "12:30" are numbers.
_CLAUSE_END = re.compile(r"(?<=[，；：、…—])|(?<=[,;:])\s")
_WORD_END = re.compile(r"(?<=\s)")
_ANYWHERE = re.compile(r"(?<=.)", re.DOTALL)

_CJK = re.compile(r"[\u3000-\u30ff\u3400-\u9fff\uff00-\uffef]")


def sentences(text: str) -> Iterator[str]:
    """The sentences of `text` that have a sound, with the blanks behind them. A line's end is a sentence's.

    Abbreviations and decimals end none, whatever the language around them.
    """
    from sentencex import segment as sentence_ends  # here: an LLM server beside Triton imports us for the tokens alone

    for line in text.split("\n"):
        found = [sentence for sentence in sentence_ends("en", line) if is_speakable(sentence)]
        if found:
            found[-1] = _closed(found[-1])
        yield from found


def segments(
    spoken: Iterable[str], count: CountTokens, budget: int = SEGMENT_TOKENS, least: int = LEAST_TOKENS
) -> Iterator[str]:
    """Sentences joined into segments of at most `budget` tokens, the last of at most `budget + least`.

    Lazy: no more sentences are asked for than it takes to know that a segment is complete.
    """
    ready, current, size = "", "", 0
    for piece in (piece for sentence in spoken for piece in fitting(sentence, count, budget)):
        tokens = count(piece)
        if current and size + tokens > budget:
            if ready:
                yield ready.strip()
            ready, current, size = current, "", 0
        current, size = current + piece, size + tokens
        if ready and size >= least:
            yield ready.strip()
            ready = ""
    if ready or current:
        yield (ready + current).strip()


def fitting(sentence: str, count: CountTokens, budget: int = SEGMENT_TOKENS) -> list[str]:
    """A sentence as it is where it fits `budget`, else its clauses, and those that do not fit as words, and so on."""
    pieces = [sentence]
    for end in (_CLAUSE_END, _WORD_END, _ANYWHERE):
        if all(count(piece) <= budget for piece in pieces):
            break
        pieces = [part for piece in pieces for part in _cut(piece, end, count, budget)]
    return [piece for piece in pieces if is_speakable(piece)]


def _cut(piece: str, end: re.Pattern[str], count: CountTokens, budget: int) -> Iterator[str]:
    """`piece` cut at some of its `end`s: each part holds as many tokens as fit, one that is too long stands alone."""
    if count(piece) <= budget:
        yield piece
        return
    part, size = "", 0
    for unit in _units(piece, end):
        tokens = count(unit)
        if part and size + tokens > budget:
            yield part
            part, size = "", 0
        part, size = part + unit, size + tokens
    if part:
        yield part


def _units(piece: str, end: re.Pattern[str]) -> Iterator[str]:
    begin = 0
    for match in end.finditer(piece):
        if match.end() > begin:
            yield piece[begin : match.end()]
            begin = match.end()
    if begin < len(piece):
        yield piece[begin:]


def _closed(sentence: str) -> str:
    """The last sentence of a line: with a blank behind it, and a mark that the LLM hears as an end if it has none.

    Chinese and Japanese put no blank between sentences.
    """
    sentence = sentence.rstrip()
    wide = _CJK.search(sentence)
    if sentence[-1].isalnum():
        sentence += "。" if wide else "."
    return sentence if wide else sentence + " "
