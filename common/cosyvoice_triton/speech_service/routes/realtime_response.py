"""One response of the realtime protocol: what it speaks, and which words of it were spoken."""

import uuid
from dataclasses import dataclass, field
from typing import Any

from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.speech_service.answer import SpeechAnswer
from cosyvoice_triton.speech_service.audio.spoken import Word, spoken_words, unspoken
from cosyvoice_triton.speech_service.bodies import SpeechRequest


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex[:20]}"


@dataclass
class Response:
    """One response: what it speaks, and how it ends. metadata: the client's, which it gets back. item: of the
    conversation.

    waiting: a text that comes in the place of what no segment has yet. replaced: what is to be told of the last one
    that came.
    """

    wanted: SpeechRequest
    metadata: dict[str, str]
    id: str = field(default_factory=lambda: new_id("resp"))
    answer: SpeechAnswer | None = None
    ending: bool = False  # its last messages are being sent
    waiting: str | None = None
    replaced: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.item: dict[str, Any] = {
            "id": new_id("item"),
            "role": "assistant",
            "text": self.wanted.input,
            "spoken": True,
        }

    def words(self, seconds: float | None = None) -> list[Word]:
        """Return the words that were spoken within so many seconds of the audio, or in what there is of it."""
        return [] if self.answer is None else spoken_words(self.wanted.input, self.answer, seconds)

    def spoken(self) -> str:
        """Return the beginning of the text that complete segments have."""
        return self.wanted.input[: 0 if self.answer is None else unspoken(self.wanted.input, self.answer)]

    def replace(self, answer: SpeechAnswer, text: str, by: tuple[Utterance, ...], seconds: float | None) -> None:
        """Let another text, spoken by these utterances, follow the segment that is being generated. seconds: of the
        audio that were heard, by which words are told; None: what there is of it."""

        def taken() -> tuple[Utterance, ...]:
            begin = self.spoken()
            dropped = self.wanted.input[len(begin) :].strip()
            self.replaced = {"words": self.words(seconds), "dropped": dropped}
            self.wanted.input = begin + text if dropped else f"{begin} {text}".strip()
            answer.chars += len(text)
            self.waiting = None
            return by

        self.waiting, answer.instead = text, taken

    def usage(self) -> dict[str, Any] | None:
        """Return OpenAI's usage of what was generated so far."""
        if self.answer is None:
            return None
        usage = self.answer.usage
        text, audio = usage["input_tokens"], usage["output_tokens"]
        return usage | {
            "input_token_details": {"text_tokens": text, "audio_tokens": 0, "cached_tokens": 0},
            "output_token_details": {"text_tokens": 0, "audio_tokens": audio},
        }
