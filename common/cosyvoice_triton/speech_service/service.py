"""What the routes share: the parts of the running service, and the steps from a request to its audio."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
from pydantic import BaseModel
from starlette.requests import HTTPConnection

from cosyvoice_triton import stacks
from cosyvoice_triton.client.answer import SEGMENTS
from cosyvoice_triton.client.utterance import Pieces, Utterance
from cosyvoice_triton.config import OrchestratorConfig
from cosyvoice_triton.constants import MAX_SOURCE_SECONDS, TOKEN_RATE
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.speech_service.answer import SpeechAnswer
from cosyvoice_triton.speech_service.audio.encoding import FORMATS, MARK, AudioEncoder
from cosyvoice_triton.speech_service.audio.recordings import decode, decode_base64
from cosyvoice_triton.speech_service.audio.timestamps import Timestamps
from cosyvoice_triton.speech_service.bodies import SpeechRequest, parse, utterances
from cosyvoice_triton.speech_service.dispatcher import Dispatcher
from cosyvoice_triton.speech_service.errors import ApiError, invalid, named, naming
from cosyvoice_triton.speech_service.metrics import Metrics
from cosyvoice_triton.speech_service.outcomes import Outcomes
from cosyvoice_triton.speech_service.security.guard import API_KEY
from cosyvoice_triton.speech_service.settings import Settings, imported
from cosyvoice_triton.speech_service.voices import VoiceFolder
from cosyvoice_triton.text.cleaning import clean_text
from cosyvoice_triton.text.frontend import SPELLING, TextFrontend
from cosyvoice_triton.text.markup import without_duration
from cosyvoice_triton.text.pronunciation import MAX_WORDS, combined, pronunciations
from cosyvoice_triton.voice.judgement import judge
from cosyvoice_triton.voice.prompt import Recording

_frontend = cache(TextFrontend)

Decoder = Callable[[bytes, int], Recording]


@dataclass
class Service:
    """One per application."""

    settings: Settings
    voices: VoiceFolder
    metrics: Metrics
    dispatcher: Dispatcher
    outcomes: Outcomes = field(default_factory=Outcomes)
    sessions: int = 0  # open WebSockets
    previewing: asyncio.Lock = field(default_factory=asyncio.Lock)  # one at a time: live streams need the CPU

    @classmethod
    def of(cls, connection: HTTPConnection) -> "Service":
        """Return the service of a request's or WebSocket's application."""
        service: Service = connection.app.state.service
        return service

    @property
    def default_model(self) -> str:
        """Return the model of requests that name none; "" if none is served."""
        return self.settings.model or next(iter(self.dispatcher.pool.models), "")

    async def answer(
        self,
        wanted: SpeechRequest,
        upload: bytes | None = None,
        decode: Decoder = decode,
        encoder: AudioEncoder | None = None,
    ) -> SpeechAnswer:
        """Return the answer to a validated request, not generated yet. `upload`: an uploaded recording of the voice.
        `encoder`: by default, what the request names. ApiError, before any other work if it would be refused."""
        encoder = encoder or self.encoder(wanted)
        encoder.watermark = imported(self.settings.watermark)
        # Refusals count from here on: of what was full while a slow client sent its recording, places may be free now.
        model, since = wanted.served_model(self.settings.model), time.monotonic()
        self.dispatcher.check(model)
        decode_upload = None if upload is None else partial(decode, upload, self.settings.max_reference_bytes)
        try:
            async with self.dispatcher.decoding:
                self.dispatcher.check(model, since)
                requests = await asyncio.to_thread(utterances, wanted, decode_upload, self.voices, self.settings)
        except UnavailableError as error:  # a voice's file is damaged
            raise ApiError(503, str(error), code="unavailable", param="voice") from None
        about: dict[str, Any] = {"subtitles": wanted.subtitles, "no_words": wanted.no_words}
        answer = SpeechAnswer(requests, len(wanted.input), model, API_KEY.get(), encoder, **about)
        if detail := "word" if wanted.subtitles else wanted.timestamps:
            for each in requests:
                each.parameters[SEGMENTS] = True
            answer.timestamps = Timestamps(detail, wanted.speed)
        return answer

    async def conversion(
        self, wanted: BaseModel, source: bytes | tuple[Pieces[np.ndarray], int] | None
    ) -> SpeechAnswer:
        """Return the answer to a validated conversion, not generated yet. source: an uploaded recording, or pieces of
        speech and their rate. ApiError."""
        answer = await self.answer(self.asked(wanted))
        (utterance,) = answer.utterances
        parameters = {name: each for name, each in utterance.parameters.items() if name in ("played", "trim_reference")}
        utterance = replace(utterance, target_text="", instruct_text=None, parameters=parameters)
        if isinstance(source, tuple):
            utterance = replace(utterance, source_pieces=source[0], source_sample_rate=source[1])
        else:
            async with self.dispatcher.decoding:
                heard = await asyncio.to_thread(self._decoded, source, getattr(wanted, "audio", ""))
            utterance = replace(utterance, source=heard.wav, source_sample_rate=heard.rate)
        answer.utterances, answer.chars = (utterance,), 0
        return answer

    def asked(self, wanted: BaseModel) -> SpeechRequest:
        """Return what a validated conversion has of a request for speech. ApiError."""
        fields = wanted.model_dump(exclude_unset=True, exclude={"audio"})
        asked: SpeechRequest = parse(SpeechRequest, {**fields, "input": "."}, self.settings)
        return asked

    def _decoded(self, upload: bytes | None, encoded: str) -> Recording:
        """Return speech to convert. ApiError."""
        with naming("audio"):
            if upload is not None:
                return decode(upload, self.settings.max_reference_bytes, MAX_SOURCE_SECONDS)
            if not encoded:
                raise ValueError("audio is missing: upload the recording as a file")
            return decode_base64(encoded, self.settings.max_reference_bytes, MAX_SOURCE_SECONDS)

    async def preview(self, wanted: SpeechRequest, upload: bytes | None = None) -> dict[str, Any]:
        """Return what will be spoken, as `TextFrontend.preview` does, of all parts of the text; the warnings include
        those about a recording in the request. ApiError."""
        answer = await self.answer(wanted, upload, encoder=AudioEncoder("pcm"))  # nothing is encoded
        with self.dispatcher.pool.lease(answer.model) as (_, model):
            stack = stacks.of_model(model).name
        async with self.previewing:
            try:
                judged = upload is not None or bool(wanted.ref_audio)
                parts = [await asyncio.to_thread(self._preview, stack, each, judged) for each in answer.utterances]
            except ValueError as error:
                raise invalid(*named(str(error))) from None
        whole: dict[str, Any] = {"language": parts[0]["language"]}
        for name in ("segments", "seconds", "warnings", "left_out"):
            if found := [each for part in parts for each in part.get(name, ())]:
                whole[name] = list(dict.fromkeys(found)) if name == "warnings" else found
        return whole

    def _preview(self, stack: str, utterance: Utterance, judged: bool) -> dict[str, Any]:
        asked, name = utterance.parameters, utterance.speaker or ""
        text = without_duration(utterance.target_text)[0]
        answer = _frontend(stack).preview(
            clean_text(text, name="target_text", max_chars=self.settings.max_input_chars),
            str(asked.get("language", "")),
            normalize=bool(asked.get("text_frontend", True)),
            request_seconds=int(asked.get("max_tokens", OrchestratorConfig.max_tokens)) / TOKEN_RATE,
            as_is=[name for name in SPELLING if not asked.get(name, True)],
            voice_text=utterance.reference_text or self.voices.transcript(name),
            pronunciation=combined(
                pronunciations(asked.get("pronunciation", ""), max_words=3 * MAX_WORDS), self.voices.pronunciation(name)
            ),
        )
        if judged and (wav := utterance.reference) is not None:
            recording = Recording(wav, utterance.reference_text or "", utterance.reference_sample_rate)
            if found := judge(recording).warnings:
                answer["warnings"] = [*answer.get("warnings", ()), *found]
        return answer

    def encoder(self, wanted: SpeechRequest) -> AudioEncoder:
        """Return an encoder for the requested format, rate and speed; ApiError."""
        kind, rate = FORMATS.get(wanted.response_format), wanted.sample_rate
        if rate is None and kind is not None and self.settings.sample_rate in kind.rates:
            rate = self.settings.sample_rate
        try:
            about = rate, wanted.speed, wanted.volume_multiplier, wanted.frame_ms
            tags, paced = MARK if self.settings.mark == "on" else None, wanted.pace is not None and not wanted.complete
            return AudioEncoder(wanted.response_format, *about, tags, wanted.complete, paced)
        except ValueError as error:
            raise invalid(error, str(error).split()[0]) from None
