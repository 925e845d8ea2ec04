"""Subtitles to one track of speech, with each cue in its time."""

import re
from collections.abc import Callable, Iterable, Iterator
from html import unescape
from typing import NamedTuple

import numpy as np

from cosyvoice_triton.constants import MIN_REFERENCE_SECONDS, SAMPLE_RATE

_CLOCK = r"(?:(\d+):)?(\d\d):(\d\d)[.,](\d{3})"
_TIMES = re.compile(rf"^{_CLOCK}[ \t]*-->[ \t]*{_CLOCK}.*$", re.MULTILINE)
_TAG = re.compile(r"<[^>]*>|\{\\[^}]*\}")  # of WebVTT and SubRip; {\an8} of SubStation


class Cue(NamedTuple):
    """A text, and when it is shown, in seconds."""

    start: float
    end: float
    text: str


def read_cues(file: str) -> list[Cue]:
    """Return the cues of SubRip or WebVTT that have a text. ValueError if there is none, or one ends before it
    begins."""
    file, cues = file.replace("\r\n", "\n"), []
    for found in _TIMES.finditer(file):
        text = re.split(r"\n[ \t]*(?:\n|$)", file[found.end() :], maxsplit=1)[0] if found.end() < len(file) else ""
        said = " ".join(unescape(_TAG.sub("", text)).split())
        start, end = _seconds(*found.groups()[:4]), _seconds(*found.groups()[4:])
        if end <= start:
            raise ValueError(f"the cue {found[0]!r} ends before it begins")
        if said:
            cues.append(Cue(start, end, said))
    if not cues:
        raise ValueError("there are no cues like '00:00:01,000 --> 00:00:03,000' with a text below")
    return cues


def track(
    cues: Iterable[Cue], speak: Callable[[str, float], np.ndarray], on_warning: Callable[[str], object]
) -> Iterator[np.ndarray]:
    """Yield speech and the silence before it, float32 (N,), in order. speak: returns a text in so many seconds. A cue
    that the one before leaves no room begins late, which is a warning."""
    at = 0
    for cue in sorted(cues):
        begin = round(cue.start * SAMPLE_RATE)
        if at > begin + SAMPLE_RATE // 10:
            on_warning(f"{(at - begin) / SAMPLE_RATE:.2f} s late: {cue.text[:80]!r}")
        speech = speak(cue.text, max(cue.end - cue.start, MIN_REFERENCE_SECONDS))
        yield np.concatenate([np.zeros(max(0, begin - at), np.float32), speech])
        at = max(at, begin) + speech.size


def _seconds(hours: str | None, minutes: str, seconds: str, milliseconds: str) -> float:
    return 3600 * int(hours or 0) + 60 * int(minutes) + int(seconds) + int(milliseconds) / 1000
