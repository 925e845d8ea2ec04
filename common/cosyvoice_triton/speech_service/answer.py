"""The answer to one request for speech: the requests to a model that it consists of, and what they have generated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.constants import SAMPLE_RATE, TOKEN_RATE
from cosyvoice_triton.speech_service.audio.encoding import AudioEncoder
from cosyvoice_triton.speech_service.audio.timestamps import Subtitles, Timestamps, subtitles


@dataclass
class SpeechAnswer:
    """Utterances that are generated one after another, and encoded as one audio.

    chars: of the request's text, with markup. key: the name of the caller's API key. timestamps: of what was generated
    so far, if they are wanted; then the utterances ask for segments. subtitles: their format, which needs timestamps.
    no_words: what is made of a text without words: "silence" or an "error". instead: called once where a segment ends;
    what it returns is generated in the place of all that would follow.
    samples: generated so far, at the models' rate and normal speed. warnings: of the models, such as speech cut short.
    """

    utterances: tuple[Utterance, ...]
    chars: int
    model: str = ""
    key: str = ""
    encoder: AudioEncoder = field(default_factory=lambda: AudioEncoder("pcm"))
    timestamps: Timestamps | None = None
    subtitles: Subtitles | None = None
    no_words: str = "error"
    instead: Callable[[], Sequence[Utterance]] | None = None
    samples: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage, and the seconds at normal speed. input_tokens counts characters, because only Triton
        has the LLM's tokenizer."""
        text = sum(each.pieces.length for each in self.utterances if each.pieces is not None) or self.chars
        speech = round(self.samples / SAMPLE_RATE * TOKEN_RATE)
        about = {"input_tokens": text, "output_tokens": speech, "total_tokens": text + speech}
        return {**about, "seconds": round(self.samples / SAMPLE_RATE, 3)}

    @property
    def with_warnings(self) -> dict[str, list[str]]:
        """Return the warnings so far as a field of a JSON object; no field without warnings."""
        return {"warnings": self.warnings} if self.warnings else {}

    @property
    def with_subtitles(self) -> dict[str, str]:
        """Return the subtitles so far as a field of a JSON object; no field if they are not wanted."""
        if self.subtitles is None or self.timestamps is None:
            return {}
        return {"subtitles": subtitles(self.timestamps.segments, self.subtitles)}

    def new_segments(self) -> list[dict[str, Any]]:
        """Return the timestamps of the segments that ended since the last call; none if they are not wanted."""
        return [] if self.timestamps is None else self.timestamps.take()
