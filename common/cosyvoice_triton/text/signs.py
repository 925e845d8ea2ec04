"""Signs that nobody hears, and the variants that typography has of letters, digits, hyphens and blanks."""

import re
import unicodedata

# Format characters, but the joiner and the tags of emoji, which markdown.py removes with them.
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u180e\u3164\uffa0\u200b-\u200c\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff]"
)
_JOINER = re.compile("(?<![\u200d\ufe0f\u2600-\u27bf\U0001f000-\U0001ffff])\u200d")  # not that of an emoji
_BLANK = re.compile("[\u00a0\u2000-\u200a\u202f\u205f]")
_SAME = str.maketrans({"\u2010": "-", "\u2011": "-", "\u2212": "-", "\ufe63": "-", "\uff0d": "-", "\u2044": "/"})
_VULGAR = re.compile("(\\d?)([\u00bc-\u00be\u2150-\u215e\u2189])")
_RAISED = "[\u207b\u00b9\u00b2\u00b3\u2070\u2074-\u2079]+"
_POWER = re.compile(f"(?<=\\d){_RAISED}")
_FOOTNOTE = re.compile(f"(?:(?<=[a-z]{{4}})|(?<=[.,;:!?。，、\u4e00-\u9fff])(?<!米)){_RAISED}")
_SUPERSCRIPT = re.compile("(?<=[A-Za-z)])[\u00b2\u00b3]")  # of m² and x²: the languages read it
# Letters and digits that are others in another dress: full width, mathematical, ligatures, super- and subscripts.
_DRESSED = re.compile(
    "[\uff10-\uff19\uff21-\uff3a\uff41-\uff5a\ufb00-\ufb06\u2070-\u209c\u00b9\u00b2\u00b3\u2460-\u2473"
    "\u2102\u2107\u210a-\u2115\u2119-\u211d\u2124\u2128-\u2131\u2133-\u2138\U0001d400-\U0001d7ff\u33a0-\u33a5\u338d-\u339e\uff05\uff04\uffe1]"
)
# A heart between two words is one.
_LOVE = (
    re.compile("\\b(I|[Ww]e|[Yy]ou|[Tt]hey)\\s?[❤♥]\ufe0f?\\s?(?=[A-Za-z])"),
    re.compile("(?<=[我们])[❤♥]\ufe0f?(?=[\u4e00-\u9fff])"),
)
_FULL_WIDTH_MARK = re.compile("(?<=\\d)[\uff1a\uff0e](?=\\d)")


def plain_signs(text: str) -> str:
    """Return `text` without invisible characters, and with plain letters, digits, hyphens and blanks for their
    typographic variants."""
    if text.isascii():
        return text
    text = _BLANK.sub(" ", _JOINER.sub("", _INVISIBLE.sub("", text))).translate(_SAME)
    text = _LOVE[1].sub("爱", _LOVE[0].sub(r"\1 love ", text))
    text = _VULGAR.sub(_fraction, text)
    text = _FOOTNOTE.sub("", _POWER.sub(lambda match: "^" + _plain(match[0]), text))
    kept = _SUPERSCRIPT.sub(lambda match: {"\u00b2": "\ue002", "\u00b3": "\ue003"}[match[0]], text)
    kept = _DRESSED.sub(lambda match: _plain(match[0]), kept)
    kept = kept.replace("\ue002", "\u00b2").replace("\ue003", "\u00b3")
    return _FULL_WIDTH_MARK.sub(lambda match: {"\uff1a": ":", "\uff0e": "."}[match[0]], kept)


def _plain(dressed: str) -> str:
    return unicodedata.normalize("NFKC", dressed).replace("\u2212", "-")


def _fraction(match: re.Match[str]) -> str:
    written = _plain(match[2]).replace("\u2044", "/")
    return f"{match[1]} {written}" if match[1] else written
