"""Which words of a text were spoken, for callers who take the rest back."""

from itertools import accumulate
from typing import Any

from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.speech_service.answer import SpeechAnswer
from cosyvoice_triton.speech_service.audio.word_times import word_spans
from cosyvoice_triton.text.segments import expected_seconds

SENTENCE_ENDS = (".", "!", "?", "。", "！", "？")
TOLERANCE = 0.05  # seconds: the times of words are estimates

Word = dict[str, Any]  # word, start and end, in seconds


def spoken_words(text: str, answer: SpeechAnswer, seconds: float | None = None) -> list[Word]:
    """Return the words of `text` that end within so many seconds of the answer's audio, and within what there is of it.

    The answer has timestamps of words. Those of a segment that is not complete are estimated by its text.
    """
    if answer.timestamps is None:
        return []
    speed, segments = answer.timestamps.speed, answer.timestamps.segments
    available = answer.samples / SAMPLE_RATE / speed
    limit = available if seconds is None else min(seconds, available)
    words = [word for segment in segments for word in segment["words"]]
    at = segments[-1]["end"] if segments else 0.0
    for begin, end in word_spans(text)[_count(text, words) :]:
        start, at = at, at + expected_seconds(text[begin:end]) / speed
        words.append({"word": text[begin:end], "start": round(start, 3), "end": round(at, 3)})
    return until(words, limit)


def unspoken(text: str, answer: SpeechAnswer) -> int:
    """Return where the text begins that is in no complete segment of the answer, which has timestamps of words."""
    assert answer.timestamps is not None
    words = [word for segment in answer.timestamps.segments for word in segment["words"]]
    return next((begin for begin, _ in word_spans(text)[_count(text, words) :]), len(text))


def _count(text: str, words: list[Word]) -> int:
    """Return how many words of a text those of complete segments are.

    A number is spoken as more words than it is written. So it is the place of the last word, or of the end of a
    sentence, that is nearest by the seconds that a text takes.
    """
    if not words:
        return 0
    written = [text[begin:end] for begin, end in word_spans(text)]
    ends = [count for count, word in enumerate(written, 1) if word == words[-1]["word"]]
    ends = ends or [count for count, word in enumerate(written, 1) if word.endswith(SENTENCE_ENDS)]
    spoken, due = expected_seconds(text_of(words)), [0.0, *accumulate(map(expected_seconds, written))]
    return min(ends, key=lambda count: abs(due[count] - spoken), default=len(written))


def until(words: list[Word], seconds: float) -> list[Word]:
    """Return the words that end by then; none before anything is heard."""
    return [word for word in words if seconds > 0 and word["end"] <= seconds + TOLERANCE]


def text_of(words: list[Word]) -> str:
    """Return the words as a text: Chinese and Japanese without spaces."""
    text = ""
    for word in words:
        text += word["word"] if not text or max(text[-1], word["word"][0]) >= "\u3000" else f" {word['word']}"
    return text
