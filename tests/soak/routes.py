"""The doors of a soak, one for every interface.

Each is opened anew for every request: on a kept connection, those after a restart of the server would fail, or wait for
gRPC's reconnection.
"""

import io
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import cast

import aiohttp
import av
import grpc
import numpy as np
from av.container import InputContainer
from cosyvoice_triton import stacks
from cosyvoice_triton.client.answer import AudioPart
from cosyvoice_triton.client.failures import ClientError, one_line
from cosyvoice_triton.client.grpc_client import explained
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.load.doors import SPEECH, Door, GrpcDoor, HttpDoor, WebSocketDoor, WebSocketSession, recording_of
from cosyvoice_triton.speech_service.routes.runtime_grpc import PROTO

STREAMED, WHOLE = stacks.DIT, stacks.UNET  # served streamed, and for offline requests
VOICES = "/v1/audio/voices"
UNKNOWN_VOICE = "HTTP 400.*unknown speaker"
SHORT = "A short sentence."


@dataclass(frozen=True)
class OnceDoor(Door):
    """Another door, opened for each request and closed after it."""

    opened: Callable[[], Door]

    async def stream(self, request: Utterance, timeout: float) -> AsyncGenerator[AudioPart, None]:
        door = self.opened()
        try:
            async with aclosing(door.stream(request, timeout)) as parts:
                async for part in parts:
                    yield part
        finally:
            await door.aclose()


def doors(triton: str, speech: str, runtime: str, gateway: str) -> dict[str, Door]:
    """Return the doors by their routes' names. triton, runtime: gRPC's host:port. speech, gateway: URLs, of the speech
    service and of Envoy before it."""
    socket = f"ws{speech.removeprefix('http')}"
    opened: dict[str, Callable[[], Door]] = {
        "grpc": partial(GrpcDoor, triton, STREAMED.orchestrator),
        "grpc-offline": partial(GrpcDoor, triton, WHOLE.orchestrator, "offline"),
        "speech": partial(EncodedDoor, speech),
        "websocket": partial(WebSocketDoor, socket),
        "barge-in": partial(BargeInDoor, socket),
        "runtime-grpc": partial(RuntimeGrpcDoor, runtime),
        "voices": partial(VoicesDoor, speech),
        "gateway": partial(EncodedDoor, gateway),
    }
    return {route: OnceDoor(opens) for route, opens in opened.items()}


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


@dataclass(frozen=True)
class RuntimeGrpcDoor(Door):
    """The plain runtime's gRPC service, at host:port."""

    address: str

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
            async with grpc.aio.insecure_channel(self.address) as channel:
                async for response in services.CosyVoiceStub(channel).Inference(message, timeout=timeout):
                    yield AudioPart.of_pcm(response.tts_audio)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise explained(str(error.code()), error.details(), self.address, timeout) from None
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
