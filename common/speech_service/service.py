"""What every route is given: the parts of the running service, and the two steps from a request to its audio."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from starlette.requests import HTTPConnection

from common.errors import UnavailableError
from common.speech_service.core import Job, SpeechCore
from common.speech_service.encoding import Renderer
from common.speech_service.errors import ApiError, invalid
from common.speech_service.metrics import Metrics
from common.speech_service.recordings import decode
from common.speech_service.requests import SpeechRequest, utterance
from common.speech_service.settings import Settings
from common.speech_service.shelf import Shelf

Decoder = Callable[[bytes, int], np.ndarray]


@dataclass
class Service:
    """One per application."""

    settings: Settings
    shelf: Shelf
    metrics: Metrics
    core: SpeechCore
    sessions: int = 0  # open WebSockets

    @classmethod
    def of(cls, connection: HTTPConnection) -> "Service":
        """That of a request or a WebSocket."""
        service: Service = connection.app.state.service
        return service

    async def job(self, wanted: SpeechRequest, upload: bytes | None = None, decode: Decoder = decode) -> Job:
        """What to speak, in the voice of a recording that came beside the fields, if one did. ApiError."""
        recorded = None if upload is None else partial(decode, upload, self.settings.max_reference_bytes)
        try:
            spoken = await asyncio.to_thread(utterance, wanted, recorded, self.shelf, self.settings)
        except UnavailableError as error:  # the file of a voice
            raise ApiError(503, str(error), code="unavailable", param="voice") from None
        return Job(spoken, wanted.served_model(self.settings.model))

    def renderer(self, wanted: SpeechRequest) -> Renderer:
        """How to write it; ApiError."""
        try:
            return Renderer(wanted.response_format, wanted.sample_rate or self.settings.sample_rate, wanted.speed)
        except ValueError as error:
            raise invalid(error, str(error).split()[0]) from None

    def audio(self, job: Job, renderer: Renderer) -> AsyncGenerator[bytes, None]:
        """Speak it."""
        return self.core.render(job, renderer)
