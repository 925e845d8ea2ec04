"""A client for every interface: sends a case and checks its answer.

Each is a coroutine that reports the parts of the answer as they come and returns at the answer's regular end. It raises
ClientError for an error that the server has sent, with "HTTP STATUS" where there is one, and for a connection that
breaks. It is cancelled with its task. Connections are not kept, because a server that restarts would make later
requests wait for gRPC's reconnection.
"""

import asyncio
import base64
import dataclasses
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
import av
import grpc
import numpy as np
import soundfile
import tritonclient.http as triton_http
from av.container import InputContainer
from cosyvoice_triton.client.grpc_client import AsyncConnection, explained
from cosyvoice_triton.client.requests import ClientError, Recorder, Utterance, one_line
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.speech_service.routes.runtime_grpc import PROTO

from tests.soak.cases import FORMATS, VOICES, SoakCase
from tests.soak.hostile import attack

LIMIT = 300.0  # seconds for a whole answer; a silent server is given up much earlier
LEAST_SECONDS = 0.1  # of audio in a whole answer
SPEECH = "/v1/audio/speech"
ADDED = "/v1/audio/voices"


class Parts(Recorder):
    """The parts of an answer. `changed` is called with each."""

    def __init__(self, changed: Callable[[], None]) -> None:
        super().__init__()
        self._changed = changed
        self.count = 0

    def _add(self, waveform: np.ndarray | None, now: float) -> None:
        super()._add(waveform, now)
        if waveform is not None and not np.isfinite(waveform).all():
            raise ClientError("the audio is not finite")
        self.note()

    def note(self) -> None:
        """Counts a part with audio that is not decoded yet."""
        self.count += 1
        self._changed()

    def alive(self) -> None:
        """Notes a message without audio."""
        self._changed()

    def check(self) -> None:
        """ClientError unless the answer is as long as some word."""
        if (seconds := sum(self.samples) / SAMPLE_RATE) < LEAST_SECONDS:
            raise ClientError(f"a whole answer of {seconds:.3f} s of audio")


@dataclass(frozen=True)
class Addresses:
    """The servers' addresses; empty: there is none. streaming, offline: names of Triton's models of either kind."""

    grpc: str = ""
    http: str = ""
    speech: str = ""
    runtime: str = ""
    streaming: str = ""
    offline: str = ""

    @property
    def routes(self) -> list[str]:
        """Return the routes that lead there."""
        needs = {
            "grpc": self.grpc and self.streaming,
            "grpc-offline": self.grpc and self.offline,
            "triton-http": self.http and self.offline,
            "runtime-grpc": self.runtime,
        }
        return [route for route in (*ROUTES, "voices") if needs.get(route, self.speech)]


class Client:
    """`async with Client(addresses) as client: await client.send(case, parts)`"""

    def __init__(self, addresses: Addresses) -> None:
        self.addresses = addresses

    async def __aenter__(self) -> "Client":
        timeout = aiohttp.ClientTimeout(total=LIMIT, sock_connect=10)
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def send(self, case: SoakCase, parts: Parts) -> None:
        """Sends one request of any route but "voices", which is several."""
        await ROUTES[case.route](self, case, parts)

    # --- Triton --------------------------------------------------------------------------------------------------

    async def grpc(self, case: SoakCase, parts: Parts) -> None:
        await self._triton_grpc(case, parts, self.addresses.streaming, "streaming")

    async def grpc_offline(self, case: SoakCase, parts: Parts) -> None:
        await self._triton_grpc(case, parts, self.addresses.offline, "offline")

    async def _triton_grpc(self, case: SoakCase, parts: Parts, model: str, mode: str) -> None:
        async with AsyncConnection(self.addresses.grpc) as connection:
            await connection.record(model, _utterance(case), mode, LIMIT, parts)
        parts.check()

    async def triton_http(self, case: SoakCase, parts: Parts) -> None:
        request = _utterance(case)
        body, header = triton_http.InferenceServerClient.generate_request_body(
            request.tensors(triton_http.InferInput), parameters=request.parameters or None
        )
        url = f"http://{self.addresses.http}/v2/models/{self.addresses.offline}/infer"
        headers = {"Inference-Header-Content-Length": str(header)}
        async with self._answer("POST", url, data=body, headers=headers) as answer:
            length = answer.headers.get("Inference-Header-Content-Length")
            result = triton_http.InferenceServerClient.parse_response_body(
                await answer.read(), header_length=None if length is None else int(length)
            )
        parts.take(result)
        parts.check()

    # --- the speech service --------------------------------------------------------------------------------------

    async def speech(self, case: SoakCase, parts: Parts) -> None:
        """Asks for one answer in any format, streamed or at once."""
        body = _speech_body(case) | {"response_format": FORMATS[case.choice % len(FORMATS)]}
        body |= {} if case.bad is None else case.bad.change
        data = body["body"] if "body" in body else json.dumps(body)
        async with self._speech(data) as answer:
            content = await _read(answer, parts)
        _check_sound(content, body["response_format"])

    async def speech_sse(self, case: SoakCase, parts: Parts) -> None:
        body = _speech_body(case) | {"response_format": "pcm", "stream_format": "sse"}
        body |= {} if case.bad is None else case.bad.change
        last: dict[str, Any] = {}
        async with self._speech(json.dumps(body)) as answer:
            async for line in answer.content:
                if line.startswith(b"data: "):
                    last = json.loads(line[6:])
                    if last["type"] == "speech.audio.error":
                        raise ClientError(one_line(last["error"]["message"]))
                    if last["type"] == "speech.audio.delta":
                        parts.add(_pcm(base64.b64decode(last["audio"])))
        if last.get("type") != "speech.audio.done":
            raise ClientError("the events ended without speech.audio.done")
        parts.check()

    async def speech_batch(self, case: SoakCase, parts: Parts) -> None:
        body = _speech_body(case) | {"response_format": "pcm"}
        items = [{"input": body.pop("input")}, {"input": "A short sentence."}]
        body |= {"items": items} | ({} if case.bad is None else dict(case.bad.change))
        async with self._answer("POST", f"{self.addresses.speech}{SPEECH}/batch", json=body) as answer:
            results = (await answer.json())["results"]
        for result in results:
            if result["status"] != "success":
                raise ClientError(f"an item of a batch: {one_line(result['error']['message'])}")
            parts.add(_pcm(base64.b64decode(result["audio_data"])))
        if len(results) != len(items):
            raise ClientError(f"a batch of {len(items)} items has {len(results)} results")

    async def websocket(self, case: SoakCase, parts: Parts) -> None:
        """Sends an utterance in pieces of text; after a barge-in another one in the same session."""
        url = f"{self.addresses.speech}{SPEECH}/stream"
        with _connected():
            async with self._http.ws_connect(url) as socket:
                if case.bad is not None:
                    await socket.send_json(case.bad.change["message"])
                    await self._until(socket, "session.done", parts)
                config = _speech_body(case)
                text = config.pop("input")
                await socket.send_json({"type": "session.config", **config})
                for at in range(0, len(text), 7):
                    await socket.send_json({"type": "input.text", "text": text[at : at + 7]})
                await socket.send_json({"type": "input.done"})
                if case.barge_in:
                    await self._until(socket, "audio.start", parts)
                    await socket.send_json({"type": "input.cancel"})
                    await self._until(socket, "audio.cancelled", parts)
                    await socket.send_json({"type": "input.text", "text": "A short sentence."})
                    await socket.send_json({"type": "input.done"})
                await self._until(socket, "session.done", parts)
                await socket.send_json({"type": "session.close"})
        parts.check()

    async def _until(self, socket: "aiohttp.ClientWebSocketResponse[Any]", wanted: str, parts: Parts) -> None:
        """Receive until a message of this type. ClientError for an error, and if the socket is closed before."""
        async for message in socket:
            if message.type is aiohttp.WSMsgType.BINARY:
                parts.add(_pcm(message.data))
                continue
            event = message.json()
            parts.alive()
            if event["type"] == "error":
                raise ClientError(one_line(event["error"]["message"]))
            if event["type"] == wanted:
                return
        raise ClientError(f"the WebSocket was closed with code {socket.close_code} before {wanted}")

    async def runtime_http(self, case: SoakCase, parts: Parts) -> None:
        route, fields, recording = _runtime_fields(case)
        form = aiohttp.FormData(fields)
        if recording is not None:
            form.add_field("prompt_wav", wav(recording), filename="prompt.wav")
        async with self._answer("POST", f"{self.addresses.speech}/inference_{route}", data=form) as answer:
            data = await _read(answer, parts)
        parts.add(_pcm(data))
        parts.check()

    async def runtime_grpc(self, case: SoakCase, parts: Parts) -> None:
        messages, services = grpc.protos_and_services(PROTO)
        route, fields, recording = _runtime_fields(case)
        payload: dict[str, Any] = dict(fields)
        if recording is not None:
            payload["prompt_audio"] = np.round(recording * 32767).astype("<i2").tobytes()
        kind = {"sft": "sftRequest", "zero_shot": "zeroshotRequest", "cross_lingual": "crosslingualRequest"}[route]
        request = messages.Request(**{f"{route}_request": getattr(messages, kind)(**payload)})
        try:
            async with grpc.aio.insecure_channel(self.addresses.runtime) as channel:
                async for response in services.CosyVoiceStub(channel).Inference(request, timeout=LIMIT):
                    parts.add(_pcm(response.tts_audio))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise explained(str(error.code()), error.details(), self.addresses.runtime, LIMIT) from None
            raise ClientError(f"{error.code().name} {one_line(error.details())}") from None
        parts.check()

    async def hostile(self, case: SoakCase, parts: Parts) -> None:
        """Sends what nobody should, and what is wrong with a request as JSON that is too deep."""
        if case.bad is not None:
            async with self._speech(str(case.bad.change["body"])):
                pass
        await attack(self.addresses, case.choice)
        parts.note()

    # --- registered voices ---------------------------------------------------------------------------------------

    async def add_voice(self, name: str, audio: bytes, transcript: str) -> None:
        form = aiohttp.FormData({"name": name, "ref_text": transcript})
        form.add_field("audio_sample", audio, filename="voice.wav")
        async with self._answer("POST", f"{self.addresses.speech}{ADDED}", data=form):
            pass

    async def delete_voice(self, name: str, unsure: bool = False) -> None:
        """unsure: whether there is such a voice."""
        try:
            async with self._answer("DELETE", f"{self.addresses.speech}{ADDED}/{name}"):
                pass
        except ClientError as error:
            if not (unsure and str(error).startswith("HTTP 404")):
                raise

    async def voices(self) -> list[str]:
        async with self._answer("GET", f"{self.addresses.speech}{ADDED}") as answer:
            return [voice["id"] for voice in (await answer.json())["voices"] if "alias_of" not in voice]

    async def say(self, voice: str, parts: Parts) -> None:
        """A short sentence in a registered voice."""
        body = {"input": "A short sentence.", "voice": voice, "response_format": "pcm"}
        async with self._speech(json.dumps(body)) as answer:
            data = await _read(answer, parts)
        parts.add(_pcm(data))
        parts.check()

    # --- HTTP ----------------------------------------------------------------------------------------------------

    def _speech(self, data: str) -> Any:
        url, headers = f"{self.addresses.speech}{SPEECH}", {"Content-Type": "application/json"}
        return self._answer("POST", url, data=data.encode("utf-8", "surrogatepass"), headers=headers)

    @asynccontextmanager
    async def _answer(self, method: str, url: str, **how: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """ClientError "HTTP STATUS message" unless the status is one of success."""
        with _connected():
            async with self._http.request(method, url, **how) as answer:
                if not answer.ok:
                    raise ClientError(f"HTTP {answer.status} {one_line(await answer.text())}")
                yield answer


@contextmanager
def _connected() -> Iterator[None]:
    """ClientError if the connection breaks."""
    try:
        yield
    except (aiohttp.ClientError, OSError) as error:
        raise ClientError(f"the connection broke: {type(error).__name__}: {one_line(error)}") from None
    except asyncio.TimeoutError:
        raise ClientError(f"no complete answer within {LIMIT:g} s") from None


Route = Callable[[Client, SoakCase, Parts], Awaitable[None]]
ROUTES: Mapping[str, Route] = {
    "grpc": Client.grpc,
    "grpc-offline": Client.grpc_offline,
    "triton-http": Client.triton_http,
    "speech": Client.speech,
    "speech-sse": Client.speech_sse,
    "speech-batch": Client.speech_batch,
    "websocket": Client.websocket,
    "runtime-http": Client.runtime_http,
    "runtime-grpc": Client.runtime_grpc,
    "hostile": Client.hostile,
}


def _utterance(case: SoakCase) -> Utterance:
    """The request to Triton, with what is wrong with it."""
    return case.utterance if case.bad is None else dataclasses.replace(case.utterance, **case.bad.change)


def _speech_body(case: SoakCase) -> dict[str, Any]:
    """The fields of a good request to the speech service."""
    said = case.utterance
    body: dict[str, Any] = {"input": said.target_text, "seed": case.seed}
    if said.reference is None:
        return body | {"voice": said.speaker}
    body["ref_audio"] = base64.b64encode(wav(said.reference)).decode()
    return body | ({"ref_text": said.reference_text} if said.reference_text else {})


def _runtime_fields(case: SoakCase) -> tuple[str, dict[str, str], np.ndarray | None]:
    """The plain runtime's route, its texts and its recording."""
    said = case.utterance
    if case.bad is not None:
        return "sft", {"tts_text": said.target_text, "spk_id": VOICES[0], **case.bad.change}, None
    if said.reference is None:
        return "sft", {"tts_text": said.target_text, "spk_id": str(said.speaker)}, None
    if not said.reference_text:
        return "cross_lingual", {"tts_text": said.target_text}, said.reference
    return "zero_shot", {"tts_text": said.target_text, "prompt_text": said.reference_text}, said.reference


async def _read(answer: aiohttp.ClientResponse, parts: Parts) -> bytes:
    """The whole body; each piece that arrives is a part."""
    content = b""
    async for piece in answer.content.iter_any():
        content += piece
        parts.note()
    return content


def wav(recording: np.ndarray | None) -> bytes:
    """A WAV file of a recording at 16 kHz."""
    assert recording is not None
    file = io.BytesIO()
    soundfile.write(file, recording, PROMPT_SAMPLE_RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


def _pcm(data: bytes) -> np.ndarray:
    """16-bit samples as float32 (N,)."""
    return np.frombuffer(data, "<i2").astype(np.float32) / 32768


def _check_sound(content: bytes, kind: str) -> None:
    """ClientError unless `content` is a file of this format with audio in it."""
    if kind == "pcm":
        seconds = len(content) / 2 / SAMPLE_RATE
    else:
        try:
            with av.open(io.BytesIO(content)) as file:
                frames = list(cast(InputContainer, file).decode(audio=0))
                seconds = sum(float(frame.samples / frame.sample_rate) for frame in frames)
        except av.FFmpegError as error:
            raise ClientError(f"a whole answer that is no {kind}: {one_line(error)}") from None
    if seconds < LEAST_SECONDS:
        raise ClientError(f"a whole answer of {seconds:.3f} s of audio")
