"""POST /v1/audio/voice-conversion: speech in another voice, with its words and its timing. WS
/v1/audio/voice-conversion/stream: the same while somebody speaks.

    client  session.config {input_sample_rate, and fields of the POST}   binary frames: 16-bit samples, little-endian
            input.done   input.cancel   session.close
    server  audio.start {utterance_index, format, sample_rate}, binary frames, audio.done {utterance_index, total_bytes,
            error, usage}   warning {utterance_index, message}   audio.cancelled {utterance_index}   error {error}
"""

from collections import deque
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, WebSocket
from starlette.responses import Response

from cosyvoice_triton.client.utterance import Pieces
from cosyvoice_triton.constants import MAX_REFERENCE_RATE, MAX_SOURCE_SECONDS, MIN_REFERENCE_RATE, PROMPT_SAMPLE_RATE
from cosyvoice_triton.speech_service import openapi as doc
from cosyvoice_triton.speech_service.bodies import ConversionRequest, parse
from cosyvoice_triton.speech_service.errors import ApiError, invalid
from cosyvoice_triton.speech_service.limits import MAX_WAITING_CONVERSIONS
from cosyvoice_triton.speech_service.routes.reading import Body
from cosyvoice_triton.speech_service.routes.sessions import SocketSessionBase
from cosyvoice_triton.speech_service.routes.speech import about_speech, responded
from cosyvoice_triton.speech_service.service import Service

PATH = "/v1/audio/voice-conversion"
_SAMPLE_BYTES = 4  # in memory

router = APIRouter()

_BODY = Body(ConversionRequest, "audio", (doc.JSON, doc.MULTIPART))


@router.post(PATH, **about_speech(_BODY))
async def convert(request: Request) -> Response:
    """Speak a recording in another voice; the audio is streamed."""
    service = Service.of(request)
    async with service.dispatcher.upload_slot(request.headers.get("content-length")):
        wanted, upload = await _BODY.read(request)
        answer = await service.conversion(wanted, upload)
    return responded(service, wanted, answer)


@router.websocket(f"{PATH}/stream")
async def conversion_socket(socket: WebSocket) -> None:
    """Serve one connection with any number of utterances."""
    await ConversionSession.serve(socket)


class ConversionSession(SocketSessionBase):
    """What one client has said so far, and what of it is still to be converted."""

    def __init__(self, socket: WebSocket, service: Service) -> None:
        super().__init__(socket, service)
        self._wanted = parse(ConversionRequest, {"response_format": "pcm"}, service.settings)
        self._rate = PROMPT_SAMPLE_RATE
        self._pieces: Pieces[np.ndarray] | None = None  # of the utterance that has not ended
        self._waiting: deque[Pieces[np.ndarray]] = deque()
        self._spoken: Pieces[np.ndarray] | None = None  # the one that is being converted
        self._utterance = 0
        self.handlers = {
            "session.config": self._configure,
            "input.done": self._finish,
            "input.cancel": self._cancel,
            "session.close": self._close,
        }

    async def _finish(self, _: dict[str, Any]) -> None:
        if self._pieces is not None:
            self._pieces.end()
        self._pieces = None

    async def _cancel(self, _: dict[str, Any]) -> None:
        self._waiting.clear()
        await self.stop_speaking()
        self._pieces = self._spoken = None
        cancelled, self._utterance = self._utterance, self._utterance + 1
        self._hold()
        await self._send("audio.cancelled", utterance_index=cancelled)

    async def _configure(self, fields: dict[str, Any]) -> None:
        if self._pieces or self._waiting or self._speaking:
            raise invalid("session.config during an utterance: send it before its audio or after audio.done")
        rate = fields.pop("input_sample_rate", PROMPT_SAMPLE_RATE)
        if not isinstance(rate, int) or not MIN_REFERENCE_RATE <= rate <= MAX_REFERENCE_RATE:
            message = f"input_sample_rate is not a number of Hz from {MIN_REFERENCE_RATE} to {MAX_REFERENCE_RATE}"
            raise invalid(message, "input_sample_rate")
        config = {"response_format": "pcm", **fields}
        wanted = parse(ConversionRequest, config, self._service.settings)
        self._service.encoder(self._service.asked(wanted))
        self._keep(len(wanted.ref_audio))
        self._wanted, self._rate = wanted, rate

    def _hold(self, samples: int = 0) -> None:
        """Hold the budget's bytes for the voice's recording and the audio, with so many further samples. ApiError."""
        known = {id(each): each.length for each in (*self._waiting, self._pieces, self._spoken) if each is not None}
        self._keep(len(self._wanted.ref_audio) + _SAMPLE_BYTES * (sum(known.values()) + samples))

    async def _handle_audio(self, data: bytes) -> None:
        if len(data) % 2:
            raise invalid(f"a frame of {len(data)} bytes: expected whole 16-bit samples")
        if self._pieces is None:
            if len(self._waiting) >= MAX_WAITING_CONVERSIONS:
                raise ApiError(
                    429, f"{MAX_WAITING_CONVERSIONS} utterances are waiting: wait for audio.done", code="too_much_audio"
                )
            self._pieces = Pieces(np.concatenate)
            self._waiting.append(self._pieces)
            self._wake()
        if self._pieces.length + len(data) // 2 > MAX_SOURCE_SECONDS * self._rate:
            raise invalid(f"the utterance lasts more than {MAX_SOURCE_SECONDS:g} s: this frame is not converted")
        self._hold(len(data) // 2)
        self._pieces.add(np.frombuffer(data, "<i2").astype(np.float32) / (1 << 15))

    async def _speak_next(self) -> bool:
        if not self._waiting:
            return False
        self._spoken = self._waiting.popleft()
        opened = self._service.conversion(self._wanted, (self._spoken, self._rate))
        await self._send_answer({"utterance_index": self._utterance}, opened)
        return True

    def _answer_ended(self) -> None:
        self._utterance, self._spoken = self._utterance + 1, None
        self._hold()
