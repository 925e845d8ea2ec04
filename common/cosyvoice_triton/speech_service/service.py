"""What the routes share: the parts of the running service, and the steps from a request to its audio."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial

from starlette.requests import HTTPConnection

from cosyvoice_triton.client.requests import SEGMENTS
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.speech_service.audio.encoding import FORMATS, AudioEncoder, framed
from cosyvoice_triton.speech_service.audio.recordings import decode
from cosyvoice_triton.speech_service.audio.timestamps import Timestamps
from cosyvoice_triton.speech_service.bodies import SpeechRequest, utterances
from cosyvoice_triton.speech_service.dispatcher import Dispatcher, SpeechJob
from cosyvoice_triton.speech_service.errors import ApiError, invalid
from cosyvoice_triton.speech_service.metrics import Metrics
from cosyvoice_triton.speech_service.settings import Settings
from cosyvoice_triton.speech_service.voices import VoiceFolder
from cosyvoice_triton.voice.prompt import Recording

Decoder = Callable[[bytes, int], Recording]


@dataclass
class Service:
    """One per application."""

    settings: Settings
    voices: VoiceFolder
    metrics: Metrics
    dispatcher: Dispatcher
    sessions: int = 0  # open WebSockets

    @classmethod
    def of(cls, connection: HTTPConnection) -> "Service":
        """Return the service of a request's or WebSocket's application."""
        service: Service = connection.app.state.service
        return service

    async def job(self, wanted: SpeechRequest, upload: bytes | None = None, decode: Decoder = decode) -> SpeechJob:
        """Return the validated job; `upload`: an uploaded recording of the voice. ApiError, before any other work if it
        would be refused."""
        model = wanted.served_model(self.settings.model)
        self.dispatcher.check(model)
        decode_upload = None if upload is None else partial(decode, upload, self.settings.max_reference_bytes)
        try:
            async with self.dispatcher.reading:
                self.dispatcher.check(model)
                requests = await asyncio.to_thread(utterances, wanted, decode_upload, self.voices, self.settings)
        except UnavailableError as error:  # a voice's file is damaged
            raise ApiError(503, str(error), code="unavailable", param="voice") from None
        job = SpeechJob(requests, len(wanted.input), model)
        if detail := "word" if wanted.subtitles else wanted.timestamps:
            for each in requests:
                each.parameters[SEGMENTS] = True
            job.timestamps = Timestamps(detail, wanted.speed)
        return job

    def encoder(self, wanted: SpeechRequest) -> AudioEncoder:
        """Return an encoder for the requested format, rate and speed; ApiError."""
        kind, rate = FORMATS.get(wanted.response_format), wanted.sample_rate
        if rate is None and kind is not None and self.settings.sample_rate in kind.rates:
            rate = self.settings.sample_rate
        try:
            return AudioEncoder(wanted.response_format, rate, wanted.speed, wanted.volume_multiplier, wanted.frame_ms)
        except ValueError as error:
            raise invalid(error, str(error).split()[0]) from None

    def audio(self, job: SpeechJob, encoder: AudioEncoder) -> AsyncGenerator[bytes, None]:
        """Return the encoded audio of a job, in frames if the encoder has them."""
        return framed(self.dispatcher.encoded(job, encoder), encoder)
