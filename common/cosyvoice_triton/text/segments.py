"""Split text into sentences and group them into segments: the text of one request to the LLM.

A segment is long enough for natural intonation and short enough for the audio that one LLM request can produce. Text is
split between sentences, else between clauses, else between words.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from cosyvoice_triton.text.cleaning import has_words, is_speakable
from cosyvoice_triton.text.endings import closed
from cosyvoice_triton.text.sentences import SentenceSplitter

# Seconds of expected speech. CosyVoice2's own limit is 80 Chinese characters, about 17 s.
SEGMENT_SECONDS = 18.0
SHORTEST_LIMIT = 6.0  # however few tokens a request may have: less has no intonation, and the LLM is asked to continue
REQUEST_SHARE = 0.6  # of what one LLM request can speak: speakers differ, and so do texts from their estimate
SHORT_SHARE = 1 / 6  # of the limit: what is left of a text does not stay alone if it is shorter than this

Seconds = Callable[[str], float]  # expected_seconds, with the language of the whole text

# Ends of clauses. Western punctuation ends one only before whitespace: "1,000" and "12:30" are numbers.
_CLAUSE_END = re.compile(r"(?<=[，；：、…—])|(?<=[,;:])\s")
_WORD_END = re.compile(r"(?<=\s)")
_ANYWHERE = re.compile(r"[^\W\d_]{1,8}|.", re.DOTALL)  # a few letters at a time: a letter alone says little of a word


def segment_limit(request_seconds: float) -> float:
    """Return the seconds of a segment, given those that one LLM request can speak."""
    return max(SHORTEST_LIMIT, min(SEGMENT_SECONDS, REQUEST_SHARE * request_seconds))


def sentences(text: str, close: bool = True) -> Iterator[str]:
    """Yield the sentences of `text` that can be spoken, with their trailing whitespace. The end of a line ends a
    sentence.

    Abbreviations and decimals do not, in any language. `close`: end each line with a full stop if it has none.
    """
    for line in text.split("\n"):
        splitter = SentenceSplitter()
        found = [sentence for sentence in (*splitter.push(line), splitter.finish()) if is_speakable(sentence)]
        if found and close:
            found[-1] = closed(found[-1], None)
        yield from found


def segments(spoken: Iterable[str], seconds: Seconds, limit: float = SEGMENT_SECONDS) -> Iterator[str]:
    """Yield sentences joined into segments that take at most `limit` seconds.

    Lazy: reads only as many sentences as needed to know that a segment is complete.
    """
    ready: list[_Piece] = []  # complete, unless the text ends shortly after it
    current: list[_Piece] = []
    for text in (piece for sentence in spoken for piece in fitting(sentence, seconds, limit) if has_words(piece)):
        piece = _Piece(text, seconds(text))
        if current and _length(current) + piece.seconds > limit:
            if ready:
                yield _joined(ready)
            ready, current = current, []
        current.append(piece)
        if ready and _length(current) >= SHORT_SHARE * limit:
            yield _joined(ready)
            ready = []
    if ready and _length(ready) + _length(current) <= limit:
        ready, current = [], ready + current
    elif len(ready) > 1 and ready[-1].seconds + _length(current) <= limit:
        current.insert(0, ready.pop())
    yield from (_joined(segment) for segment in (ready, current) if segment)


class _Piece(NamedTuple):
    text: str
    seconds: float


def _length(pieces: list[_Piece]) -> float:
    return sum(piece.seconds for piece in pieces)


def _joined(pieces: list[_Piece]) -> str:
    return "".join(piece.text for piece in pieces).strip()


def fitting(sentence: str, seconds: Seconds, limit: float = SEGMENT_SECONDS) -> list[str]:
    """Return the sentence if it takes at most `limit` seconds, else parts of about equal length that do.

    It is split between clauses; a clause that does not fit between words, and a word that does not fit anywhere.
    """
    pieces = [_Piece(sentence, seconds(sentence))]
    for end in (_CLAUSE_END, _WORD_END, _ANYWHERE):
        pieces = [part for piece in pieces for part in _cut(piece, end, seconds, limit)]
    return [piece.text for piece in pieces if is_speakable(piece.text)]


def _cut(piece: _Piece, end: re.Pattern[str], seconds: Seconds, limit: float) -> Iterator[_Piece]:
    """Yield `piece` if it fits, else split at matches of `end`; a unit that is too long is a part of its own."""
    if piece.seconds <= limit:
        yield piece
        return
    units = [_Piece(unit, seconds(unit)) for unit in _units(piece.text, end)]
    rest = _length(units)
    part, size = "", 0.0
    for unit in units:
        share = rest / max(1, math.ceil(rest / limit))
        if part and (size + unit.seconds > limit or size + unit.seconds / 2 > share):
            yield _Piece(part, size)
            part, size, rest = "", 0.0, rest - size
        part, size = part + unit.text, size + unit.seconds
    if part:
        yield _Piece(part, size)


def _units(piece: str, end: re.Pattern[str]) -> Iterator[str]:
    begin = 0
    for match in end.finditer(piece):
        if match.end() > begin:
            yield piece[begin : match.end()]
            begin = match.end()
    if begin < len(piece):
        yield piece[begin:]
