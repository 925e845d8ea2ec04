"""Japanese kanji as kana, for CosyVoice3, which reads kanji as Chinese. By the optional package pyopenjtalk-plus."""

import logging
import re
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)

_KANJI = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff々〇]")
_PIECE = re.compile(r"[^\x00-\x7f]+")
MISSING = (
    "Japanese kanji are read as Chinese by CosyVoice3 unless they are written as kana: "
    "install the extra `japanese` (pip install 'cosyvoice-triton[japanese]'), or send kana"
)


def kana_available() -> bool:
    """Return whether the package that reads kanji is installed."""
    return _analyzer() is not None


def has_kanji(text: str) -> bool:
    """Return whether `text` has characters that only `in_kana` makes readable."""
    return bool(_KANJI.search(text))


def in_kana(text: str) -> str:
    """Return `text` with the words that have kanji in katakana, as they are pronounced; kana and all else stay.

    Without the package, and where it fails, the text stays as it is.
    """
    analyze = _analyzer()
    if analyze is None or not has_kanji(text):
        return text
    return _PIECE.sub(lambda match: _piece(match[0], analyze) if has_kanji(match[0]) else match[0], text)


def _piece(text: str, analyze: Any) -> str:
    try:
        words = analyze(text)
    except Exception as error:  # a reading never fails a request
        logger.warning("no reading of %r: %s", text[:80], error)
        return text
    read, position = "", 0
    for word in words:
        written = word["string"]
        begin = text.find(written, position)
        if begin < 0:
            return text
        read += text[position:begin]
        position = begin + len(written)
        read += word["pron"].replace("’", "") if has_kanji(written) and word["pron"] != "、" else written
    return read + text[position:]


@cache
def _analyzer() -> Any:
    """Return what divides a text into words with readings; None without the package, which takes a second to load."""
    try:
        from pyopenjtalk import run_frontend
    except ImportError:
        return None
    return run_frontend
