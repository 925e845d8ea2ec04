"""The doors of a soak, one for every interface.

Connections are not kept, because a server that restarts would make later requests wait for gRPC's reconnection.
"""

import base64
import io
import json
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
import av
import grpc
import numpy as np
import tritonclient.http as triton_http
from av.container import InputContainer
from cosyvoice_triton.client.answer import AudioPart
from cosyvoice_triton.client.failures import ClientError, one_line, refused
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
    """The servers' addresses. streaming, offline: names of Triton's models of either kind."""

    grpc: str
    http: str
    speech: str
    runtime: str
    streaming: str
    offline: str

    def doors(self) -> dict[str, Door]:
        """Return the doors that lead there, by their routes' names."""
        socket = f"ws{self.speech.removeprefix('http')}"
        return {
            "grpc": GrpcDoor(self.grpc, self.streaming, "streaming"),
            "grpc-offline": GrpcDoor(self.grpc, self.offline, "offline"),
            "triton-http": TritonHttpDoor(f"http://{self.http}", self.offline, keep=False),
            "speech": EncodedDoor(self.speech, keep=False),
            "speech-sse": EventsDoor(self.speech, keep=False),
            "speech-batch": BatchDoor(self.speech, keep=False),
            "websocket": WebSocketDoor(socket, keep=False),
            "barge-in": BargeInDoor(socket, keep=False),
            "runtime-http": RuntimeHttpDoor(self.speech, keep=False),
            "runtime-grpc": RuntimeGrpcDoor(self.runtime),
            "voices": VoicesDoor(self.speech, keep=False),
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


class TritonHttpDoor(HttpDoor):
    """Triton's HTTP."""

    async def stream(self, request: Utterance, timeout: float) -> AsyncGenerator[AudioPart, None]:
        body, length = triton_http.InferenceServerClient.generate_request_body(
            request.tensors(triton_http.InferInput), parameters=request.parameters or None
        )
        headers = {"Inference-Header-Content-Length": str(length)}
        path = f"/v2/models/{self._model}/infer"
        async with self.answer("POST", path, timeout, data=body, headers=headers) as answer:
            length = answer.headers.get("Inference-Header-Content-Length")
            content = await answer.read()
        yield AudioPart.of(
            triton_http.InferenceServerClient.parse_response_body(content, header_length=length and int(length))
        )


class EncodedDoor(HttpDoor):
    """The speech service, asked for an answer in any format."""

    async def stream(self, request: Utterance, timeout: float) -> AsyncGenerator[AudioPart, None]:
        content, fields = b"", self.fields(request)
        async with self.answer("POST", SPEECH, timeout, json=fields) as answer:
            async for piece in answer.content.iter_any():
                content += piece
                yield AudioPart()
        yield _decoded(content, fields["response_format"])


class EventsDoor(HttpDoor):
    """The speech service, asked for server-sent events."""

    async def stream(self, request: Utterance, timeout: float) -> AsyncGenerator[AudioPart, None]:
        last: dict[str, Any] = {}
        body = {**self.fields(request), "stream_format": "sse"}
        async with self.answer("POST", SPEECH, timeout, json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: "):
                    last = json.loads(line[6:])
                    if last["type"] == "speech.audio.error":
                        raise refused(last["error"]["message"])
                    if last["type"] == "speech.audio.delta":
                        yield AudioPart.of_pcm(base64.b64decode(last["audio"]))
        if last.get("type") != "speech.audio.done":
            raise ClientError("the events ended without speech.audio.done")


class BatchDoor(HttpDoor):
    """The speech service, asked for two utterances at once."""

    async def stream(self, request: Utterance, timeout: float) -> AsyncGenerator[AudioPart, None]:
        fields = self.fields(request)
        items = [{"input": fields.pop("input")}, {"input": SHORT}]
        async with self.answer("POST", f"{SPEECH}/batch", timeout, json={"items": items, **fields}) as answer:
            results = (await answer.json())["results"]
        for result in results:
            if result["status"] != "success":
                raise ClientError(f"an item of a batch: {one_line(result['error']['message'])}")
            yield AudioPart.of_pcm(base64.b64decode(result["audio_data"]))
        if len(results) != len(items):
            raise ClientError(f"a batch of {len(items)} items has {len(results)} results")


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


class RuntimeHttpDoor(HttpDoor):
    """The plain runtime's routes."""

    async def stream(self, request: Utterance, timeout: float) -> AsyncGenerator[AudioPart, None]:
        route, fields = _runtime(request)
        form, content = aiohttp.FormData(fields), b""
        if request.reference is not None:
            form.add_field("prompt_wav", recording_of(request), filename="prompt.wav")
        async with self.answer("POST", f"/inference_{route}", timeout, data=form) as answer:
            async for piece in answer.content.iter_any():
                content += piece
                yield AudioPart()
        yield AudioPart.of_pcm(content)


class RuntimeGrpcDoor(Door):
    """The plain runtime's gRPC service."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def stream(self, request: Utterance, timeout: float) -> AsyncGenerator[AudioPart, None]:
        messages, services = grpc.protos_and_services(PROTO)
        route, fields = _runtime(request)
        payload: dict[str, Any] = dict(fields)
        if request.reference is not None:
            payload["prompt_audio"] = np.round(request.reference * 32767).astype("<i2").tobytes()
        kind = {"sft": "sftRequest", "zero_shot": "zeroshotRequest", "cross_lingual": "crosslingualRequest"}[route]
        message = messages.Request(**{f"{route}_request": getattr(messages, kind)(**payload)})
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


def _runtime(said: Utterance) -> tuple[str, dict[str, str]]:
    """The plain runtime's route and its texts."""
    if said.reference is None:
        return "sft", {"tts_text": said.target_text, "spk_id": str(said.speaker)}
    if not said.reference_text:
        return "cross_lingual", {"tts_text": said.target_text}
    return "zero_shot", {"tts_text": said.target_text, "prompt_text": said.reference_text}


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
