"""Split text into sentences and group them into segments: the text of one request to the LLM.

A segment is long enough for natural intonation and short enough for the audio that one LLM request can produce. Text is
split between sentences, else between clauses, else between words.
"""

import re
from collections.abc import Callable, Iterable, Iterator

from common.text.cleaning import is_speakable

# In text tokens, CosyVoice2's own values. At 25 speech tokens and about 4 words per second, a text token makes 6 or 7
# speech tokens, so a full segment lasts about 22 s.
SEGMENT_TOKENS = 80
MIN_TOKENS = 20  # a shorter remainder is appended to the previous segment

CountTokens = Callable[[str], int]

# Ends of clauses. Western punctuation ends one only before whitespace: "1,000" and "12:30" are numbers.
_CLAUSE_END = re.compile(r"(?<=[，；：、…—])|(?<=[,;:])\s")
_WORD_END = re.compile(r"(?<=\s)")
_ANYWHERE = re.compile(r"(?<=.)", re.DOTALL)

_CJK = re.compile(r"[\u3000-\u30ff\u3400-\u9fff\uff00-\uffef]")


def sentences(text: str) -> Iterator[str]:
    """The sentences of `text` that can be spoken, with their trailing whitespace. The end of a line ends a sentence.

    Abbreviations and decimals do not, in any language.
    """
    from sentencex import segment as sentence_ends  # here: LLM servers import this package only to count tokens

    for line in text.split("\n"):
        found = [sentence for sentence in sentence_ends("en", line) if is_speakable(sentence)]
        if found:
            found[-1] = _closed(found[-1])
        yield from found


def segments(
    spoken: Iterable[str], count: CountTokens, budget: int = SEGMENT_TOKENS, minimum: int = MIN_TOKENS
) -> Iterator[str]:
    """Sentences joined into segments of at most `budget` tokens, the last one of at most `budget + minimum`.

    Lazy: reads only as many sentences as needed to know that a segment is complete.
    """
    ready, current, size = "", "", 0
    for piece in (piece for sentence in spoken for piece in fitting(sentence, count, budget)):
        tokens = count(piece)
        if current and size + tokens > budget:
            if ready:
                yield ready.strip()
            ready, current, size = current, "", 0
        current, size = current + piece, size + tokens
        if ready and size >= minimum:
            yield ready.strip()
            ready = ""
    if ready or current:
        yield (ready + current).strip()


def fitting(sentence: str, count: CountTokens, budget: int = SEGMENT_TOKENS) -> list[str]:
    """The sentence if it fits `budget`, else its clauses, and clauses that do not fit as words, and so on."""
    pieces = [sentence]
    for end in (_CLAUSE_END, _WORD_END, _ANYWHERE):
        if all(count(piece) <= budget for piece in pieces):
            break
        pieces = [part for piece in pieces for part in _cut(piece, end, count, budget)]
    return [piece for piece in pieces if is_speakable(piece)]


def _cut(piece: str, end: re.Pattern[str], count: CountTokens, budget: int) -> Iterator[str]:
    """`piece` split at matches of `end` into parts as long as fit; a unit that is too long is a part of its own."""
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
    """The last sentence of a line, with a final punctuation mark if it has none, and a space after it.

    Chinese and Japanese have no space between sentences.
    """
    sentence = sentence.rstrip()
    wide = _CJK.search(sentence)
    if sentence[-1].isalnum():
        sentence += "。" if wide else "."
    return sentence if wide else sentence + " "
