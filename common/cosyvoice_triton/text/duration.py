"""How many seconds a text takes to speak: an estimate by its characters, to divide texts and to bound their speech.

Every character has a cost, so that the seconds of a text are those of its parts, and no text is free. Measured and
published rates behind the table:

Han, kana, hangul: 5.18 syllables per second of Mandarin and 7.84 of Japanese, pauses excluded (Pellegrino, Coupé and
    Marsico 2011, "A cross-language perspective on speech information rate"), 6.93 of Korean (data of Coupé, Oh, Dediu
    and Pellegrino 2019, "Different languages, similar encoding efficiency"). A Han character is one syllable in
    Chinese; in Japanese it is taken as two morae.
Latin letters: LJ Speech has 0.066 s per character, blanks and pauses included (1,308,678 characters, 86,117 s).
Others: a letter or vowel sign is taken as 0.1 s, which is slow for alphabets and right where it is a syllable.
"""

import re
import unicodedata
from functools import lru_cache

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
    text, phonemes = _PHONEME.subn("", text)
    characters = sum(_seconds(char, japanese) for char in text)
    pauses = sum(seconds * len(mark.findall(text)) for mark, seconds in _PAUSES)
    return _PHONEME_SECONDS * phonemes + characters + pauses + _SPELLED_LETTER * sum(map(len, _SPELLED.findall(text)))


@lru_cache(maxsize=1 << 14)
def _seconds(char: str, japanese: bool) -> float:
    if _HAN.match(char):
        return _HAN_JAPANESE if japanese else _HAN_CHINESE
    for script, seconds in _BY_SCRIPT:
        if script.match(char):
            return seconds
    return _BY_CATEGORY.get(unicodedata.category(char)[0], _SILENT)
