"""Clients that send what nobody should: half of a request, pings and texts whose answers they do not read, offers to
upgrade, deep JSON, floods of frames, recordings whose headers make them gigabytes.

Each holds its connection for some seconds. What it gets must match, and nobody else may notice.
"""

import asyncio
import json
import re
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
from cosyvoice_triton.client.failures import ClientError

from tests.support.bombs import flac
from tests.support.raw_connections import SPEECH, WEBSOCKET, frame, request

HOLD_SECONDS = 3.0

_TEXT = frame(1, json.dumps({"type": "input.text", "text": "Nobody listens to this. " * 8}).encode())
_OPEN = request(headers=WEBSOCKET, line=f"GET {SPEECH}/stream")

# What is sent to the speech service, and how its answer begins; nothing: there is none while the connection is held.
ATTACKS: tuple[tuple[bytes, str], ...] = (
    (request(headers=b"Connection: Upgrade\r\nUpgrade: h2c\r\n", line="GET /health"), "HTTP/1.1 (200|503)"),
    (request(b"{}", WEBSOCKET), "HTTP/1.1 400"),
    (request(b"{"), "HTTP/1.1 400"),
    (request(b'{"input":' + b"[" * 100_000), "HTTP/1.1 400"),
    (request(b'{"target_text":' + b"[" * 100_000, line="POST /v2/models/cosyvoice2_dit/infer"), "HTTP/1.1 400"),
    (request(b" " * (1 << 20), length=1 << 21), ""),
    (b"POST /v1/audio/speech HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ", ""),
    (_OPEN + frame(9, bytes(125)) * 4000, "HTTP/1.1 101"),
    (_OPEN + _TEXT + frame(1, b'{"type": "input.done"}'), "HTTP/1.1 101"),
    (_OPEN + _TEXT[:-9], "HTTP/1.1 101"),
    (_OPEN + frame(1, b"") * 30_000, "HTTP/1.1 101"),
    (_OPEN + frame(1, b"", fin=False) + frame(0, b"", fin=False) * 30_000, "HTTP/1.1 101"),
    (request(line="GET /openapi.json") * 90, "HTTP/1.1 (200|503)"),
    (request(b'{"' + b"a" * 1_000_000 + b'": 1}'), "HTTP/1.1 400"),
    (request(json.dumps({"input": "a", "ref_audio": b64encode(flac(6)).decode()}).encode()), "HTTP/1.1 400"),
)


async def attack(speech: str, runtime: str, choice: int) -> None:
    """One of them, at the services' addresses. ClientError for another answer than expected, and where there is no
    connection."""
    if runtime and choice % (len(ATTACKS) + 1) == len(ATTACKS):
        await _unsent_call(runtime)
        return
    data, expected = ATTACKS[choice % len(ATTACKS)]
    host, _, port = speech.rpartition("/")[2].partition(":")
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port), limit=64), HOLD_SECONDS)
        try:
            head = _OPEN if data.startswith(_OPEN) else data
            writer.write(head)
            with suppress(asyncio.TimeoutError):  # the server stops reading pings
                await asyncio.wait_for(writer.drain(), HOLD_SECONDS)
            received = await _first_bytes(reader, 60.0 if expected else HOLD_SECONDS)
            if expected.endswith("101"):  # what comes with the handshake would be dropped
                writer.write(data[len(head) :])
                await asyncio.sleep(HOLD_SECONDS)
        finally:
            writer.transport.abort()
    except (OSError, asyncio.TimeoutError) as error:
        raise ClientError(f"the connection broke: {error or 'no answer'}") from None
    if re.match(expected or "$", received) is None:
        raise ClientError(f"{received!r} instead of /{expected}/")


async def _first_bytes(reader: asyncio.StreamReader, seconds: float) -> str:
    with suppress(asyncio.TimeoutError):
        return (await asyncio.wait_for(reader.read(12), seconds)).decode(errors="replace")
    return ""


async def _unsent_call(address: str) -> None:
    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.sleep(HOLD_SECONDS)
        yield b""

    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/cosyvoice.CosyVoice/Inference")(nothing(), timeout=HOLD_SECONDS / 2)
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ClientError(f"the connection broke: {error.details()}") from None
