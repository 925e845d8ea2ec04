"""Doors: ways to a speech server, or to a speaker in this process, of which each takes any number of utterances.

host:port     Triton over gRPC
http://…      a speech service: `POST /v1/audio/speech`, answered with raw PCM
ws://…        the same service's WebSocket
"""

import asyncio
import base64
import io
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import aiohttp
import grpc
from async_timeout import timeout_at
from tritonclient.utils import InferenceServerException

from cosyvoice_triton.client import failures
from cosyvoice_triton.client.answer import TIMELINE, AudioPart
from cosyvoice_triton.client.failures import ClientError, one_line
from cosyvoice_triton.client.grpc_client import CONNECT_SECONDS, AsyncConnection, require_model
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.errors import OverloadedError, unavailable_message
from cosyvoice_triton.load.measure import ModelTimes, model_times
from cosyvoice_triton.voice.audio import save_audio

SPEECH = "/v1/audio/speech"
PIECE = 7  # characters of a message with text: about what an LLM writes at once


class Door(ABC):
    """A way to a server. This one always answers its probes and has nothing to close."""

    @abstractmethod
    def stream(self, request: Utterance, timeout: float) -> AsyncGenerator[AudioPart, None]:
        """Yield the answer's parts as they come, some perhaps without audio; closing the iterator cancels the request.

        timeout: seconds until the answer must be complete. ClientError if it fails.
        """

    async def require(self) -> None:
        """Raise ClientError unless there is a server that can answer."""
        if reason := await self.silence(CONNECT_SECONDS):
            raise ClientError(reason)

    async def silence(self, seconds: float) -> str:
        """Return why the server does not answer within `seconds`; "" if it does."""
        return ""

    async def model_times(self) -> list[ModelTimes]:
        """Return the counters of the server's models, if this door shows them."""
        return []

    async def aclose(self) -> None:  # noqa: B027
        """Close the connections."""


def opened(address: str, model: str, mode: str, connections: int) -> Door:
    """Return the door at an address. mode: "streaming" or "offline". connections: of gRPC, which requests share."""
    if address.startswith(("http://", "https://")):
        return HttpDoor(address, model, mode)
    if address.startswith(("ws://", "wss://")):
        return WebSocketDoor(address, model)
    return GrpcDoor(address, model, mode, connections)


class GrpcDoor(Door):
    """One of Triton's speech models over gRPC."""

    def __init__(self, server: str, model: str, mode: str = "streaming", connections: int = 1) -> None:
        self._server, self._model, self._mode = server, model, mode
        self._connections = [AsyncConnection(server) for _ in range(connections)]
        self._cycle = cycle(self._connections)
        self._probe = AsyncConnection(server)

    def stream(self, request: Utterance, timeout: float) -> AsyncGenerator[AudioPart, None]:
        return next(self._cycle).stream(self._model, request, self._mode, timeout)

    async def require(self) -> None:
        await require_model(self._probe.client, self._server, self._model, self._mode)

    async def silence(self, seconds: float) -> str:
        try:
            live = await self._probe.client.is_server_live(client_timeout=seconds)
            return "" if live else "it reports that it is not live"
        except InferenceServerException as error:
            late = error.status() == str(grpc.StatusCode.DEADLINE_EXCEEDED)
            return f"no answer within {seconds:g} s" if late else one_line(error.message())

    async def model_times(self) -> list[ModelTimes]:
        return await model_times(self._probe.client, self._server)

    async def aclose(self) -> None:
        for connection in (self._probe, *self._connections):
            await connection.aclose()


class HttpDoor(Door):
    """A speech service over HTTP, with as many connections as there are requests at once."""

    def __init__(self, url: str, model: str = "", mode: str = "streaming") -> None:
        self.url = url.rstrip("/")
        self._model, self._streams = model, mode == "streaming"
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def stream(self, request: Utterance, timeout: float) -> AsyncGenerator[AudioPart, None]:
        received, body = b"", {"stream": self._streams, **self.fields(request)}
        async with self.answer("POST", SPEECH, timeout, json=body) as answer:
            async for data, chunk_ends in answer.content.iter_chunks():
                received += data
                if chunk_ends:
                    whole = len(received) // 2 * 2  # samples have two bytes
                    yield AudioPart.of_pcm(received[:whole])
                    received = received[whole:]
        yield AudioPart.of_pcm(received[: len(received) // 2 * 2])

    def fields(self, request: Utterance) -> dict[str, Any]:
        """Return the request as fields of a JSON body; its parameters may replace any."""
        fields: dict[str, Any] = {"model": self._model, "input": request.target_text, "response_format": "pcm"}
        texts = {"voice": request.speaker, "instructions": request.instruct_text, "ref_text": request.reference_text}
        fields |= {name: text for name, text in texts.items() if text is not None}
        if request.reference is not None:
            fields["ref_audio"] = base64.b64encode(recording_of(request)).decode()
        return fields | {name: value for name, value in request.parameters.items() if name != TIMELINE}

    async def silence(self, seconds: float) -> str:
        try:
            async with self.answer("GET", "/health", seconds):
                return ""
        except ClientError as error:
            return str(error)

    @asynccontextmanager
    async def answer(self, method: str, path: str, timeout: float, **how: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request. ClientError unless its status is one of success, and if the connection breaks later."""
        async with _explained(self.url, timeout):
            limit = aiohttp.ClientTimeout(total=timeout)
            async with self._http.request(method, self.url + path, timeout=limit, **how) as answer:
                if not answer.ok:
                    raise _refusal(answer.status, answer.headers.get("Retry-After", ""), await answer.text())
                yield answer

    async def aclose(self) -> None:
        await self._http.close()


class WebSocketDoor(HttpDoor):
    """A speech service's WebSocket, a session for each utterance; the text is sent in pieces, as an LLM writes it."""

    def __init__(self, url: str, model: str = "") -> None:
        super().__init__(f"http{url.removeprefix('ws')}", model)  # also wss

    async def stream(self, request: Utterance, timeout: float) -> AsyncGenerator[AudioPart, None]:
        fields, last = self.fields(request), time.monotonic() + timeout
        text = fields.pop("input")
        async with _explained(self.url, timeout):
            async with self._http.ws_connect(f"{self.url}{SPEECH}/stream") as socket:
                session = WebSocketSession(socket, last)
                await session.send("session.config", **fields)
                async with aclosing(self.conversation(session, text)) as parts:
                    async for part in parts:
                        yield part
                await session.send("session.close")

    async def conversation(self, session: "WebSocketSession", text: str) -> AsyncGenerator[AudioPart, None]:
        """Speak `text` in a session."""
        await session.say(text)
        async with aclosing(session.until("session.done")) as parts:
            async for part in parts:
                yield part


@dataclass
class WebSocketSession:
    """A WebSocket's messages. last: when the answer must be complete, on the clock of `time.monotonic`."""

    socket: "aiohttp.ClientWebSocketResponse[Any]"
    last: float

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send_json({"type": kind, **fields})

    async def say(self, text: str) -> None:
        """Send an utterance."""
        for at in range(0, len(text), PIECE):
            await self.send("input.text", text=text[at : at + PIECE])
        await self.send("input.done")

    async def until(self, wanted: str) -> AsyncGenerator[AudioPart, None]:
        """Yield parts until a message of a type. ClientError for an error, and if the socket is closed before."""
        while True:
            message = await self.socket.receive(self.last - time.monotonic())
            if message.type is aiohttp.WSMsgType.BINARY:
                yield AudioPart.of_pcm(message.data)
                continue
            if message.type is not aiohttp.WSMsgType.TEXT:
                raise ClientError(f"the WebSocket was closed with code {self.socket.close_code} before {wanted}")
            event = message.json()
            if event["type"] == "error":
                raise failures.refused(event["error"]["message"])
            if event["type"] == wanted:
                return


class SpeakerDoor(Door):
    """A speaker in this process: an object whose `astream(text, **options)`, with the options of `api.Client.stream`,
    yields float32 (N,), and whose `aspeak` returns the whole of it.

    mode: "streaming" or "offline".
    """

    def __init__(self, speaker: Any, mode: str = "streaming") -> None:
        self._speaker, self._streams = speaker, mode == "streaming"

    async def stream(self, request: Utterance, timeout: float) -> AsyncGenerator[AudioPart, None]:
        speak = self._speaker.astream if self._streams else self._whole
        chunks = speak(
            request.target_text,
            voice=request.speaker,
            reference=request.reference,
            reference_text=request.reference_text,
            reference_sample_rate=request.reference_sample_rate,
            instruct_text=request.instruct_text,
            **{name: value for name, value in request.parameters.items() if name != TIMELINE},
        )
        last = asyncio.get_running_loop().time() + timeout
        try:
            async with aclosing(chunks):
                while True:
                    async with timeout_at(last):  # not around the yield: the caller's own time is theirs
                        if (chunk := await anext(chunks, None)) is None:
                            return
                    yield AudioPart(chunk)
        except asyncio.TimeoutError:
            raise failures.timed_out("this process", timeout) from None
        except (ValueError, RuntimeError) as error:
            raise failures.refused(
                unavailable_message(error) if isinstance(error, OverloadedError) else error
            ) from error

    async def _whole(self, text: str, **options: Any) -> AsyncGenerator[Any, None]:
        yield await self._speaker.aspeak(text, **options)


def recording_of(request: Utterance) -> bytes:
    """Return a WAV file of the request's recording."""
    assert request.reference is not None
    file = io.BytesIO()
    save_audio(file, request.reference, request.reference_sample_rate)
    return file.getvalue()


@asynccontextmanager
async def _explained(server: str, timeout: float) -> AsyncIterator[None]:
    """Raise ClientError if the connection breaks or is too slow."""
    try:
        yield
    except asyncio.TimeoutError:
        raise failures.timed_out(server, timeout) from None
    except (aiohttp.ClientError, OSError) as error:
        raise failures.unavailable(server, error) from None


def _refusal(status: int, retry_after: str, text: str) -> ClientError:
    """Return the error of an answer that is not one of success; `text` is its body."""
    try:
        error = json.loads(text)["error"]  # the speech service's, or Triton's
        text = error if isinstance(error, str) else error["message"]
    except (ValueError, KeyError, TypeError):  # a proxy's
        text = text[:300]
    seconds = float(retry_after) if retry_after.isdecimal() else 0.0  # a proxy's may be a date
    text = f"HTTP {status}: {text}"
    return failures.refused(unavailable_message(OverloadedError(text, seconds)) if status == 429 else text)
