"""Answers that are sent while they are made.

Until the first bytes are there nothing is sent, so an error is still a status with OpenAI's JSON. After that an error
ends the answer in a way that no client takes for success: events name it, plain audio breaks off within its chunked
body. A client that left, or does not read, ends the work at once.
"""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from async_timeout import timeout
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from common.speech_service.core import Job
from common.speech_service.errors import ApiError
from common.tasks import TaskScope

logger = logging.getLogger(__name__)

_AS_IT_COMES = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # the second is what nginx obeys


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, dict(error.headers))


class AudioResponse(Response):
    """Bytes as `parts` makes them. stall: seconds that a client may leave them unread."""

    def __init__(self, parts: AsyncGenerator[bytes, None], media_type: str, stall: float, rate: int) -> None:
        super().__init__(media_type=media_type, headers={"X-Sample-Rate": str(rate), **_AS_IT_COMES})
        del self.headers["content-length"]  # not known, so the body is chunked
        self._parts = parts
        self._stall = stall

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with TaskScope() as tasks:
            work = tasks.spawn(self._send(scope, receive, send))
            gone = tasks.spawn(_disconnected(receive))
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                scope["speech.outcome"] = "gone"

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._parts) as parts:
            try:
                first = await anext(parts)
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await self._part(send, first)
                async for part in parts:
                    await self._part(send, part)
            except (ApiError, asyncio.TimeoutError) as error:
                # The body is left without its end, upon which the server closes the connection: see RFC 9112, 8.
                scope["speech.outcome"] = "aborted"
                logger.warning("an answer was broken off after its first byte: %s", error or "nobody reads it")
                return
        await send({"type": "http.response.body", "body": b""})

    async def _part(self, send: Send, part: bytes) -> None:
        async with timeout(self._stall):
            await send({"type": "http.response.body", "body": part, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def events(parts: AsyncGenerator[bytes, None], job: Job) -> AsyncGenerator[bytes, None]:
    """Server-sent events around the parts of an answer: deltas, then `done` with the usage, or `error`."""
    begun = False
    try:
        async with aclosing(parts):
            async for part in parts:
                begun = True
                yield _event({"type": "speech.audio.delta", "audio": base64.b64encode(part).decode()})
    except ApiError as error:
        if not begun:
            raise
        yield _event({"type": "speech.audio.error", **error.body})
        return
    yield _event({"type": "speech.audio.done", "usage": job.usage})


def _event(content: dict[str, Any]) -> bytes:
    return f"event: {content['type']}\ndata: {json.dumps(content)}\n\n".encode()
