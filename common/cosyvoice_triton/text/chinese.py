"""CosyVoice2's clean-up of Chinese text (`text_normalize` of its CLI), for text whose numbers are words already."""

import re

_DASH_BETWEEN_BLANKS = re.compile(r" +[-–]+ +")
_BLANK = re.compile(r"(?<![!-~]) | (?![!-~]|\Z)")  # stays between two ASCII characters
_FULL_STOP = re.compile(r"\.+(?![0-9A-Za-z])")  # not that of "2.0.1" and "example.com"
_LONG_DASH = re.compile(r"—+")
_WORDS = str.maketrans({"²": "平方", "³": "立方"} | dict.fromkeys("（）【】()`", ""))
_OPEN_END = re.compile(r"\s*[，,、][，,、\s]*\Z")


def cleaned(sentence: str) -> str:
    """Return `sentence` without the blanks and marks that a Chinese reader does not speak; Western full stops as
    Chinese."""
    sentence = _FULL_STOP.sub("。", _DASH_BETWEEN_BLANKS.sub("，", sentence))
    return _LONG_DASH.sub(" ", _BLANK.sub("", sentence)).translate(_WORDS)


def closed(text: str) -> str:
    """Return `text` with a full stop in place of a comma at its end."""
    return _OPEN_END.sub("。", text)
