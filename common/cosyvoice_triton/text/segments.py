"""Split text into sentences and group them into segments: the text of one request to the LLM.

A segment is long enough for natural intonation and short enough for the audio that one LLM request can produce. Text is
split between sentences, else between clauses, else between words.

How many seconds a text takes to speak is estimated by its characters. Every character has a cost, so that the seconds
of a text are those of its parts, and no text is free. Measured and published rates behind the table:

Han, kana, hangul: 5.18 syllables per second of Mandarin and 7.84 of Japanese, pauses excluded (Pellegrino, Coupé and
    Marsico 2011, "A cross-language perspective on speech information rate"), 6.93 of Korean (data of Coupé, Oh, Dediu
    and Pellegrino 2019, "Different languages, similar encoding efficiency"). A Han character is one syllable in
    Chinese; in Japanese it is taken as two morae.
Latin letters: LJ Speech has 0.066 s per character, blanks and pauses included (1,308,678 characters, 86,117 s).
Others: a letter or vowel sign is taken as 0.1 s, which is slow for alphabets and right where it is a syllable.
"""

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from cosyvoice_triton.text.cleaning import has_words, is_speakable
from cosyvoice_triton.text.english_reading import ENGLISH
from cosyvoice_triton.text.language import Language

_HAN = re.compile(r"[々〇\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_KANA = re.compile(r"[\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f]")
_HANGUL = re.compile(r"[\uac00-\ud7a3]")
_LATIN = re.compile(r"[A-Za-z\u00c0-\u024f\u1e00-\u1eff\uff21-\uff3a\uff41-\uff5a]")
_SPOKEN_MARK = re.compile(r"[/@#%&*\\_]")

# Seconds of one character.
_HAN_CHINESE, _HAN_JAPANESE = 0.2, 0.26
_BY_SCRIPT = ((_KANA, 0.13), (_HANGUL, 0.15), (_LATIN, 0.07), (_SPOKEN_MARK, 0.4))
_BY_CATEGORY = {"L": 0.1, "M": 0.1, "N": 0.5, "S": 0.4, "Z": 0.0}  # the first letter of Unicode's general category
_SILENT = 0.05  # quotation marks, brackets, what cannot be printed

# In addition, for each match.
_PAUSES = ((re.compile(r"[.!?。！？…]+"), 0.35), (re.compile(r"[,;:，；：、—–]+"), 0.15))
# Acronyms and words without a vowel ("USB", "https") are spelled: seconds in addition for each letter.
_SPELLED = re.compile(r"(?<![A-Za-z'’])(?:[A-Z]{2,4}|[b-df-hj-np-tv-xzB-DF-HJ-NP-TV-XZ]{2,})(?![A-Za-z])")
_SPELLED_LETTER = 0.23
# `[HH][AH0][L][OW1]`, `[j][ǐ]`: one sound each, of which a syllable has about two. Not `[breath]`.
_PHONEME, _PHONEME_SECONDS = re.compile(r"\[[A-Za-zà-ǜ]{1,4}[0-2]?\]"), 0.1


def expected_seconds(text: str, japanese: bool | None = None) -> float:
    """Return the seconds that `text` takes to speak. `japanese`: how its Han characters are read; None: as its kana
    say."""
    return _expected(text, bool(_KANA.search(text)) if japanese is None else japanese)


@lru_cache(maxsize=64)  # of one text it is asked when that is divided, and again to bound the LLM's answer
def _expected(text: str, japanese: bool) -> float:
    text, phonemes = _PHONEME.subn("", text) if "[" in text else (text, 0)
    characters = sum(map(_SECONDS[japanese], text))
    pauses = sum(seconds * len(mark.findall(text)) for mark, seconds in _PAUSES)
    return _PHONEME_SECONDS * phonemes + characters + pauses + _SPELLED_LETTER * sum(map(len, _SPELLED.findall(text)))


def _of_character(han: float, char: str) -> float:
    of_script = (seconds for script, seconds in ((_HAN, han), *_BY_SCRIPT) if script.match(char))
    return next(of_script, _BY_CATEGORY.get(unicodedata.category(char)[0], _SILENT))


_SECONDS = [lru_cache(1 << 14)(partial(_of_character, han)) for han in (_HAN_CHINESE, _HAN_JAPANESE)]


_TAG_AT_END = re.compile(r"(?:\[[A-Za-zà-ǜ0-9_-]+\]|<[^<>]*>)\Z")
_CLOSERS = "\"'”’»›“」』】）)]}〉》"
_OPEN_END = re.compile(rf"\s*[,;:，；：、—–~～-][\s,;:，；：、—–~～-]*(?=[{re.escape(_CLOSERS)}]*\Z)")
_CJK = re.compile(r"[\u3000-\u30ff\u3400-\u9fff\uff00-\uffef]")


def closed(sentence: str, language: Language | None, last: bool = False) -> str:
    """Return the last sentence of a line, with a full stop of its script if it has no mark at its end, and a space
    after it. Chinese and Japanese have no space between sentences.

    Quotation marks, brackets and per cent signs are no marks, and end no sentence. A comma, a colon or a dash does not
    either: it stays at the end of a line, but not at that of the `last` one, after which an LLM would speak on. A tag
    of a sound stays.
    """
    sentence = sentence.rstrip()
    if last and has_words(ended := _OPEN_END.sub("", sentence)):
        sentence = ended
    if not sentence:
        return sentence
    wide = language in ("zh", "ja") or (language is None and bool(_CJK.search(sentence)))
    if is_open(sentence):
        sentence += "。" if wide else "."
    return sentence if wide else sentence + " "


def is_open(text: str) -> bool:
    """Return whether nothing says at the end of `text` that its sentence ends there."""
    if _TAG_AT_END.search(text):
        return False
    last = text.rstrip(_CLOSERS + " ")[-1:]
    return bool(last) and (unicodedata.category(last)[0] in "LNSM" or last in "%‰&@°")


# sentencex takes quadratic to cubic time for quotation marks that are never closed, and holds the GIL: 7 to 30 s for
# 65,000 characters, at most 3 ms for these.
WINDOW = 512
_UNDECIDED = 32  # last characters of a window: what follows them may still join two sentences, as after "Dr."
# An abbreviation that sentencex takes for an end, before its number. After a number it is a unit, as in "5 sec.".
_ABBREVIATION = ENGLISH.words.pattern("«count»|«short»|«month»").pattern
_BEFORE_NUMBER = re.compile(rf"(?i)(?<!\d )(?<![a-z])(?:{_ABBREVIATION})\.\s+\Z")
_NUMBER = re.compile(r"\d|[IVX]+\b")
_AFTER_UNIT = re.compile(r"\d[ -]?[A-Za-z][a-z]{0,4}\.\s+\Z")  # "2 tbsp. of"


def _with_numbers(complete: list[str], last: str) -> tuple[list[str], str]:
    """Join a sentence that ends with "Apt." and one that begins with a digit."""
    joined = list[str]()
    for part in (*complete, last):
        before = _BEFORE_NUMBER if _NUMBER.match(part) else _AFTER_UNIT if part[:1].islower() else None
        if joined and before and before.search(joined[-1]):
            part = joined.pop() + part
        joined.append(part)
    return joined[:-1], joined[-1]


# What has no end of a sentence but at its own end: it needs no look for others.
ONE_SENTENCE = re.compile(r"[\w\s,，、;；'’“”()（）%$-]*[.!?。！？…]?\s*\Z")


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
            self._begin += window[used : WINDOW // 2]  # otherwise most of the window would be split again and again
            position += max(used, WINDOW // 2)

    def finish(self) -> str:
        """Return the text after the last complete sentence, which is discarded here."""
        rest, self._begin, self._rest = self._begin + self._rest, "", ""
        return rest


# Seconds of expected speech. CosyVoice2's own limit is 80 Chinese characters, about 17 s.
SEGMENT_SECONDS = 18.0
SHORTEST_LIMIT = 6.0  # however few tokens a request may have: less has no intonation, and the LLM is asked to continue
REQUEST_SHARE = 0.6  # of what one LLM request can speak: speakers differ, and so do texts from their estimate
SHORT_SHARE = 1 / 6  # of the limit: what is left of a text does not stay alone if it is shorter than this

Seconds = Callable[[str], float]  # expected_seconds, with the language of the whole text

# Clauses, words, and parts of words: a letter alone says little of a word. Western punctuation ends a clause only
# before whitespace: "1,000" and "12:30" are numbers.
_CLAUSE, _WORD, _PART = r".*?(?:[，；：、…—]|[,;:]\s|\Z)", r".*?(?:\s|\Z)", r"[^\W\d_]{1,8}|."
_UNITS = [re.compile(unit, re.DOTALL) for unit in (_CLAUSE, _WORD, _PART)]


Read = Callable[[str], tuple[str, Language | None]]  # a sentence -> how it is said, and its language


def sentences(text: str, read: Read | None = None, close: bool = True) -> Iterator[str]:
    """Yield the sentences of `text` that can be spoken, as `read` says them or as they are written, with their trailing
    whitespace. The end of a line ends a sentence.

    Abbreviations and decimals do not, in any language. `close`: end each line with a full stop if it has none.
    """
    lines = list(filter(is_speakable, text.split("\n")))
    for line in lines:
        found: Iterable[str] = [line]
        if not ONE_SENTENCE.match(line):
            splitter = SentenceSplitter()
            found = chain(splitter.push(line), iter(splitter.finish, ""))
        last = ""  # read one sentence late: only the last of a line is closed
        for sentence in found:
            if is_speakable(sentence):
                if last:
                    yield read(last)[0] if read else last
                last = sentence
        words, language = read(last) if read else (last, None)
        yield closed(words, language, bool(read) and line is lines[-1]) if close else words


def segments(spoken: Iterable[str], seconds: Seconds, limit: float = SEGMENT_SECONDS) -> Iterator[str]:
    """Yield sentences joined into segments that take at most `limit` seconds.

    Lazy: reads only as many sentences as needed to know that a segment is complete.
    """
    ready: list[_Piece] = []  # complete, unless the text ends shortly after it
    current: list[_Piece] = []
    for sentence in spoken:
        for text in filter(has_words, fitting(sentence, seconds, limit)):
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
    yield from map(_joined, filter(None, (ready, current)))


class _Piece(NamedTuple):
    text: str
    seconds: float


def _length(pieces: list[_Piece]) -> float:
    return sum(piece.seconds for piece in pieces)


def _joined(pieces: list[_Piece]) -> str:
    return "".join(map(itemgetter(0), pieces)).strip()


def fitting(sentence: str, seconds: Seconds, limit: float = SEGMENT_SECONDS) -> list[str]:
    """Return the sentence if it takes at most `limit` seconds, else parts of about equal length that do.

    It is split between clauses; a clause that does not fit between words, and a word that does not fit anywhere.
    """
    if (taken := seconds(sentence)) <= limit:
        return [sentence] if is_speakable(sentence) else []
    pieces = [_Piece(sentence, taken)]
    for unit in _UNITS:
        pieces = [part for piece in pieces for part in _cut(piece, unit, seconds, limit)]
    return [piece.text for piece in pieces if is_speakable(piece.text)]


def _cut(piece: _Piece, kind: re.Pattern[str], seconds: Seconds, limit: float) -> Iterator[_Piece]:
    """Yield `piece` if it fits, else parts of whole units of a kind; a unit that is too long is a part of its own."""
    if piece.seconds <= limit:
        yield piece
        return
    units = [(unit, seconds(unit)) for unit in kind.findall(piece.text)]
    rest = sum(taken for _, taken in units)
    part, size, share = "", 0.0, rest / max(1, math.ceil(rest / limit))
    for unit, taken in units:
        # A part of a space alone would be dropped, and two words be one.
        if part and not unit.isspace() and (size + taken > limit or size + taken / 2 > share):
            yield _Piece(part, size)
            part, size, rest = "", 0.0, rest - size
            share = rest / max(1, math.ceil(rest / limit))
        part, size = part + unit, size + taken
    if part:
        yield _Piece(part, size)
