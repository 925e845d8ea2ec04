"""When the segments and words of an answer are spoken, as JSON and as subtitles.

Of a segment: {"text", "start", "end"}, in seconds of the answer's audio, exact to a sample of the model; and if words
are wanted, "words": [{"word", "start", "end"}, …], estimates (`word_times`). The text is the one that was spoken:
normalized, with numbers as words.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from html import escape
from typing import Any, Literal

import numpy as np

from cosyvoice_triton.client.answer import AudioPart
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.speech_service.audio.word_times import word_times

Detail = Literal["word", "segment"]
Subtitles = Literal["srt", "vtt"]

CUE_CHARS, CUE_SECONDS = 84, 7.0  # of one cue: two lines of 42 characters


class Timestamps:
    """Made from the responses of a model, in order. speed: by which the answer's audio is shortened."""

    def __init__(self, detail: Detail, speed: float = 1.0) -> None:
        self._words = detail == "word"
        self._rate = SAMPLE_RATE * speed
        self.speed = speed
        self._begin = 0  # of the segment: samples of the answer
        self._audio = np.zeros(0, np.float32)  # from there on
        self._taken = 0
        self.segments: list[dict[str, Any]] = []

    def add(self, part: AudioPart) -> None:
        """Count a response; this takes some milliseconds where a segment ends."""
        self._audio = np.concatenate([self._audio, part.waveform])
        for text, samples in part.segments:
            if text:
                self.segments.append(self._segment(text, samples))
            self._begin, self._audio = self._begin + samples, self._audio[samples:]

    def take(self) -> list[dict[str, Any]]:
        """Return the segments since the last call."""
        begin, self._taken = self._taken, len(self.segments)
        return self.segments[begin:]

    def _segment(self, text: str, samples: int) -> dict[str, Any]:
        segment: dict[str, Any] = {"text": text, "start": self._at(0), "end": self._at(samples)}
        if self._words:
            segment["words"] = [
                {
                    "word": text[word.begin : word.end],
                    "start": self._at(word.start * SAMPLE_RATE),
                    "end": self._at(word.stop * SAMPLE_RATE),
                }
                for word in word_times(text, self._audio[:samples])
            ]
        return segment

    def _at(self, sample: float) -> float:
        return round((self._begin + sample) / self._rate, 3)


def subtitles(segments: Iterable[dict[str, Any]], kind: Subtitles) -> str:
    """Return a file of the segments, which have words: cues of whole words, up to CUE_CHARS and CUE_SECONDS."""
    mark, head = (",", "") if kind == "srt" else (".", "WEBVTT\n\n")
    # WebVTT reads `<`, `&` and `-->` as its own; SubRip has no escapes.
    escaped = str if kind == "srt" else partial(escape, quote=False)
    cues = (cue for segment in segments for cue in _cues(segment))
    return head + "".join(
        f"{number}\n{_clock(start, mark)} --> {_clock(end, mark)}\n{escaped(text)}\n\n"
        for number, (text, start, end) in enumerate(cues, 1)
    )


def _cues(segment: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yield the text, start and end of each cue. A new cue begins after the end of a sentence, too."""
    text, start, end, position = "", 0.0, 0.0, 0
    for word in segment["words"]:
        found = segment["text"].index(word["word"], position)
        gap = segment["text"][position:found] if text else ""
        position = found + len(word["word"])
        long = len(text + gap + word["word"]) > CUE_CHARS or word["end"] - start > CUE_SECONDS
        if text and (long or text.endswith((".", "!", "?", "。", "！", "？"))):
            yield text, start, end
            text, gap = "", ""
        start = start if text else word["start"]
        text, end = text + gap + word["word"], word["end"]
    if text:
        yield text, start, end


def _clock(seconds: float, mark: str) -> str:
    milliseconds = round(1000 * seconds)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{mark}{rest % 1000:03d}"
