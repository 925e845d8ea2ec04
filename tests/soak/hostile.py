"""Hostile clients of a soak: floods of frames, answers that nobody reads, and requests whose few bytes cost much.

Each ends with an error that says what became of it, which the soak expects; honest listeners are served meanwhile.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import aiohttp
from cosyvoice_triton import stacks
from cosyvoice_triton.client.answer import AudioPart
from cosyvoice_triton.client.failures import ClientError
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.load.doors import SPEECH, HttpDoor

from tests.support.bombs import flac
from tests.support.raw_connections import WEBSOCKET, frame, request
from tests.support.speech_fixtures import in_base64

UNREAD, UNREAD_SECONDS = 90, 2.0  # requests of a client that does not read, and how long it stays
SHAPES, MARKS = 50_000, 40_000
TEXT = {"input": "Nobody hears this sentence.", "voice": "slt", "response_format": "wav"}
INFER = f"/v2/models/{stacks.DEFAULT.orchestrator}/infer"


class HostileDoor(HttpDoor):
    """The speech service, from a client that does what the request's parameter `attack` says."""

    async def stream(self, request: Utterance, timeout: float) -> AsyncGenerator[AudioPart, None]:
        yield AudioPart()
        await ATTACKS[str(request.parameters["attack"])].run(self, timeout)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return await asyncio.open_connection(host, int(port), limit=1 << 12)

    async def post(self, path: str, timeout: float, body: Mapping[str, object]) -> None:
        async with self.answer("POST", path, timeout, json=body):
            pass


async def flood(door: HostileDoor, timeout: float, data: bytes) -> None:
    """Send frames to a WebSocket until the server closes it."""
    reader, writer = await door.connect()
    try:
        writer.write(request(headers=WEBSOCKET, line=f"GET {SPEECH}/stream"))
        await reader.readuntil(b"\r\n\r\n")
        ended = asyncio.ensure_future(_drained(reader))
        with suppress(ConnectionError):
            while not ended.done():
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(0)  # honest clients are in this process
        raise ClientError(f"the connection was closed with {await asyncio.wait_for(ended, timeout)}")
    finally:
        writer.close()


async def _drained(reader: asyncio.StreamReader) -> str:
    """The code of the close frame, or a reset, which comes to a client that was still sending."""
    received = b""
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            received = (received + data)[-200:]
    begin = received.rfind(b"\x88")
    return str(int.from_bytes(received[begin + 2 : begin + 4], "big")) if begin >= 0 else "a reset"


async def unread(door: HostileDoor, timeout: float, requests: bytes) -> None:
    """Send requests, read nothing and leave."""
    _, writer = await door.connect()
    try:
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # of a socket
        writer.write(requests)
        await asyncio.sleep(UNREAD_SECONDS)
    finally:
        writer.transport.abort()
    raise ClientError("the answers were left unread")


async def huge_shape(door: HostileDoor, timeout: float) -> None:
    wav = {"name": "reference_wav", "datatype": "FP32", "shape": [(1 << 31) - 1] * SHAPES, "data": [0.0]}
    await door.post(INFER, timeout, {"inputs": [wav]})


async def name_of_marks(door: HostileDoor, timeout: float) -> None:
    form = aiohttp.FormData({"name": "a" + "\u0301\u0316" * MARKS})
    form.add_field("audio_sample", flac(24_000), filename="voice.flac")
    async with door.answer("POST", f"{SPEECH.removesuffix('speech')}voices", timeout, data=form):
        pass


class Attack(NamedTuple):
    """What a client does, and the pattern of the error that it must end with."""

    run: Callable[[HostileDoor, float], Awaitable[None]]
    answer: str


CLOSED, LEFT = "closed with (1008|a reset)", "were left unread"
PIPELINED = request(line="GET /openapi.json") * UNREAD
ATTACKS = {
    "flood of pings": Attack(lambda door, seconds: flood(door, seconds, frame(9, b"") * 1000), CLOSED),
    "flood of errors": Attack(lambda door, seconds: flood(door, seconds, frame(1, b"{}") * 1000), CLOSED),
    "unread answers": Attack(lambda door, seconds: unread(door, seconds, PIPELINED), LEFT),
    "unread speech": Attack(lambda door, seconds: unread(door, seconds, request(json.dumps(TEXT).encode())), LEFT),
    "recording of 6 Hz": Attack(
        lambda door, seconds: door.post(SPEECH, seconds, {**TEXT, "ref_audio": in_base64(flac(6))}),
        "HTTP 400.*sample rate is 6",
    ),
    "huge shape": Attack(huge_shape, "HTTP 400.*shape"),
    "name of marks": Attack(name_of_marks, "HTTP 400.*name"),
}
