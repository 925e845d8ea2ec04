"""The doors of a soak, one for every interface.

Connections are not kept, because a server that restarts would make later requests wait for gRPC's reconnection.
"""

import io
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

import aiohttp
import av
import grpc
import numpy as np
from av.container import InputContainer
from cosyvoice_triton.client.answer import AudioPart
from cosyvoice_triton.client.failures import ClientError, one_line
from cosyvoice_triton.client.grpc_client import AsyncConnection, explained
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.load.doors import SPEECH, Door, HttpDoor, WebSocketDoor, WebSocketSession, recording_of
from cosyvoice_triton.speech_service.routes.runtime_grpc import PROTO

VOICES = "/v1/audio/voices"
UNKNOWN_VOICE = "HTTP 400.*unknown speaker"
SHORT = "A short sentence."


@dataclass(frozen=True)
class Addresses:
    """The servers' addresses. streaming, offline: names of Triton's models of either kind. gateway: of the speech
    service behind Envoy."""

    grpc: str
    speech: str
    runtime: str
    streaming: str
    offline: str
    gateway: str = ""

    def doors(self) -> dict[str, Door]:
        """Return the doors that lead there, by their routes' names."""
        socket = f"ws{self.speech.removeprefix('http')}"
        return {
            "grpc": GrpcDoor(self.grpc, self.streaming, "streaming"),
            "grpc-offline": GrpcDoor(self.grpc, self.offline, "offline"),
            "speech": EncodedDoor(self.speech, keep=False),
            "websocket": WebSocketDoor(socket, keep=False),
            "barge-in": BargeInDoor(socket, keep=False),
            "runtime-grpc": RuntimeGrpcDoor(self.runtime),
            "voices": VoicesDoor(self.speech, keep=False),
            "gateway": EncodedDoor(self.gateway, keep=False),
        }


class GrpcDoor(Door):
    """Triton's gRPC, with a connection for each request."""

    def __init__(self, server: str, model: str, mode: str) -> None:
        self._server, self._model, self._mode = server, model, mode

    async def stream(self, request: Utterance, timeout: float) -> AsyncGenerator[AudioPart, None]:
        async with AsyncConnection(self._server) as connection:
            async with aclosing(connection.stream(self._model, request, self._mode, timeout)) as parts:
                async for part in parts:
                    yield part


class EncodedDoor(HttpDoor):
    """The speech service, asked for an answer in any format."""

    async def stream(self, request: Utterance, timeout: float) -> AsyncGenerator[AudioPart, None]:
        content, fields = b"", self.fields(request)
        async with self.answer("POST", SPEECH, timeout, json=fields) as answer:
            async for piece in answer.content.iter_any():
                content += piece
                yield AudioPart()
        yield _decoded(content, fields["response_format"])


class BargeInDoor(WebSocketDoor):
    """The WebSocket of someone who interrupts the first utterance and says another one."""

    async def conversation(self, session: WebSocketSession, text: str) -> AsyncGenerator[AudioPart, None]:
        await session.say(text)
        async for part in session.until("audio.start"):
            yield part
        await session.send("input.cancel")
        async for part in session.until("audio.cancelled"):
            yield part
        async for part in super().conversation(session, SHORT):
            yield part


class RuntimeGrpcDoor(Door):
    """The plain runtime's gRPC service."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def stream(self, request: Utterance, timeout: float) -> AsyncGenerator[AudioPart, None]:
        messages, services = grpc.protos_and_services(PROTO)
        kind, fields = "sft", {"tts_text": request.target_text, "spk_id": request.speaker}
        if request.reference is not None:
            audio = np.round(request.reference * 32767).astype("<i2").tobytes()
            kind, fields = "cross_lingual", {"tts_text": request.target_text, "prompt_audio": audio}
            if request.reference_text:
                kind, fields = "zero_shot", fields | {"prompt_text": request.reference_text}
        message = messages.Request(**{f"{kind}_request": fields})
        try:
            async with grpc.aio.insecure_channel(self._address) as channel:
                async for response in services.CosyVoiceStub(channel).Inference(message, timeout=timeout):
                    yield AudioPart.of_pcm(response.tts_audio)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise explained(str(error.code()), error.details(), self._address, timeout) from None
            raise ClientError(f"{error.code().name} {one_line(error.details())}") from None


class VoicesDoor(HttpDoor):
    """The life of a voice: registered, used, deleted, unknown. `speaker` of a request is its name."""

    async def stream(self, request: Utterance, timeout: float) -> AsyncGenerator[AudioPart, None]:
        form = aiohttp.FormData({"name": request.speaker, "ref_text": request.reference_text or ""})
        form.add_field("audio_sample", recording_of(request), filename="voice.wav")
        said = Utterance(SHORT, speaker=request.speaker)
        async with self.answer("POST", VOICES, timeout, data=form):
            pass
        yield AudioPart()
        try:
            async with aclosing(super().stream(said, timeout)) as parts:
                async for part in parts:
                    yield part
        finally:
            await self.delete(str(request.speaker), timeout)
        try:
            async with self.answer("POST", SPEECH, timeout, json=self.fields(said)):
                raise ClientError(f"an answer instead of the error /{UNKNOWN_VOICE}/, in a deleted voice")
        except ClientError as error:
            if not re.search(UNKNOWN_VOICE, str(error)):
                raise

    async def delete(self, name: str, timeout: float = 60.0) -> None:
        async with self.answer("DELETE", f"{VOICES}/{name}", timeout):
            pass

    async def names(self) -> set[str]:
        """Return the registered voices."""
        async with self.answer("GET", VOICES, 60.0) as answer:
            return {voice["id"] for voice in (await answer.json())["voices"] if "alias_of" not in voice}


def _decoded(content: bytes, kind: str) -> AudioPart:
    """The audio in a file of a format. ClientError if it is none."""
    if kind == "pcm":
        return AudioPart.of_pcm(content)
    try:
        return AudioPart(np.concatenate([np.zeros(0, np.float32), *_frames(content)]))
    except av.FFmpegError as error:
        raise ClientError(f"a whole answer that is no {kind}: {one_line(error)}") from None


def _frames(content: bytes) -> Iterator[np.ndarray]:
    resampler = av.AudioResampler("flt", "mono", SAMPLE_RATE)
    with av.open(io.BytesIO(content)) as file:
        for frame in (*cast(InputContainer, file).decode(audio=0), None):
            for part in resampler.resample(frame):
                yield part.to_ndarray()[0]
