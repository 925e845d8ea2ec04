"""Streamed answers.

Nothing is sent before the first bytes exist, so an earlier error is an HTTP status with OpenAI's JSON. A later error
ends the answer in a way that no client takes for success: an event with the error, or a chunked body that ends without
its final chunk. If a client disconnects or stops reading, its work ends at once.
"""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar
from urllib.parse import quote

from async_timeout import timeout
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cosyvoice_triton.speech_service import openapi as doc
from cosyvoice_triton.speech_service.answer import SpeechAnswer
from cosyvoice_triton.speech_service.errors import ApiError
from cosyvoice_triton.speech_service.security.guard import REQUEST_ID
from cosyvoice_triton.speech_service.service import Service
from cosyvoice_triton.tasks import TaskScope

logger = logging.getLogger(__name__)

# Of whole answers -> names in the usage.
USAGE_HEADERS = {"x-input-tokens": "input_tokens", "x-output-tokens": "output_tokens", "x-audio-seconds": "seconds"}
WARNING_CHARS = 300  # in a header: warnings quote texts
_VISIBLE = " !#$&'()*+,/:;=?@[]\"<>^`{|}~"  # ASCII that a header may have; the rest is percent-encoded
_STREAMING_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # the second one is for nginx


HEADERS = {
    "X-Sample-Rate": doc.described(doc.INTEGER, "of the audio, in Hz"),
    "X-AI-Generated": doc.described(doc.BOOLEAN, "always true; not with `--mark off`"),
    "X-Speech-Warning": doc.described(doc.TEXT, "percent-encoded; warnings that are known before the first byte"),
    **{
        name.title(): doc.described(doc.NUMBER, f"`{of}` of the usage, of whole answers")
        for name, of in USAGE_HEADERS.items()
    },
}


USAGE = {"input_tokens": doc.INTEGER, "output_tokens": doc.INTEGER, "total_tokens": doc.INTEGER, "seconds": doc.NUMBER}
_WORD = doc.record({"word": doc.TEXT, "start": doc.NUMBER, "end": doc.NUMBER})
_SEGMENT = doc.record({"text": doc.TEXT, "start": doc.NUMBER, "end": doc.NUMBER}, {"words": doc.array(_WORD)})
SPEECH_FIELDS = {
    "audio_data": doc.described(doc.TEXT, "in base64"),
    "media_type": doc.TEXT,
    "sample_rate": doc.INTEGER,
    "usage": doc.component("Usage", doc.record(USAGE)),
}
SPEECH_OPTIONS = {
    "warnings": doc.array(doc.TEXT),
    "segments": doc.array(doc.component("Segment", _SEGMENT)),
    "subtitles": doc.TEXT,
}
SPEECH = doc.component("Speech", doc.record(SPEECH_FIELDS, SPEECH_OPTIONS))


ResultT = TypeVar("ResultT")
_Ended = tuple[str, ApiError | None]  # how, and why


class AudioResponse(Response):
    """Sends an answer's audio, or what `streamed` makes of it, as it is produced, or, once all is there, what `whole`
    makes of it: bytes, or an object to send as JSON.

    The headers have the answer's warnings that are known by the
    first part that is sent, and its usage if all are there.
    """

    def __init__(
        self,
        service: Service,
        answer: SpeechAnswer,
        media_type: str = "",
        streamed: Callable[[AsyncGenerator[bytes, None], SpeechAnswer], AsyncGenerator[bytes, None]] | None = None,
        whole: Callable[[bytes], bytes | dict[str, Any]] | None = None,
    ) -> None:
        headers = {"X-Sample-Rate": str(answer.encoder.rate), **_STREAMING_HEADERS}
        if service.settings.mark == "on":
            headers["X-AI-Generated"] = "true"
        super().__init__(media_type=media_type or answer.encoder.format.media_type, headers=headers)
        del self.headers["content-length"]  # unknown, so the body is chunked
        self._service = service
        self._answer = answer
        audio = service.dispatcher.encoded(answer)
        self._parts = audio if streamed is None else streamed(audio, answer)
        self._whole = whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._service.outcomes.begin(REQUEST_ID.get(), self._answer)
        ended: _Ended = "aborted", None
        try:
            ended = await unless_gone(receive, self._send(scope, receive, send)) or ("gone", None)
            if ended[0] in ("aborted", "gone"):
                scope["speech.outcome"] = ended[0]
        finally:
            self._note(*ended)

    def _note(self, status: str, error: ApiError | None = None) -> None:
        """Take note of how the answer ended; also before its last bytes are sent, as a caller who has them may ask."""
        self._service.outcomes.end(REQUEST_ID.get(), self._answer, status, error)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> _Ended:
        async with aclosing(self._parts) as parts:
            try:
                first = await anext(parts)
                if self._whole is not None:
                    made = self._whole(b"".join([first, *[part async for part in parts]]))
                    first = made if isinstance(made, bytes) else json.dumps(made).encode()
                    self.headers["content-length"] = str(len(first))
                    for header, name in USAGE_HEADERS.items():
                        self.headers[header] = str(self._answer.usage[name])
                    self._note("completed")
            except ApiError as error:
                self._note("failed", error)
                await error.response(scope, receive, send)
                return "failed", error
            if self._answer.warnings:
                self.headers["x-speech-warning"] = quote(
                    "; ".join(self._answer.warnings)[:WARNING_CHARS], safe=_VISIBLE
                )
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await self._send_part(send, first)
                async for part in parts:
                    await self._send_part(send, part)
            except (ApiError, asyncio.TimeoutError) as error:
                # The final chunk of the body is missing, so the server closes the connection: see RFC 9112, 8.
                logger.warning("an answer was aborted after its first byte: %s", error or "the client does not read it")
                return "aborted", error if isinstance(error, ApiError) else None
        self._note("completed")
        await send({"type": "http.response.body", "body": b""})
        return "completed", None

    async def _send_part(self, send: Send, part: bytes) -> None:
        async with timeout(self._service.settings.stall):
            await send({"type": "http.response.body", "body": part, "more_body": True})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT | None:
    """Return the result of `work`; None, with the work cancelled, if the client leaves before: it would otherwise be
    noticed only when something is sent. What is left of the request's body is discarded."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with TaskScope() as tasks:
        result = tasks.spawn(work)
        await asyncio.wait((result, tasks.spawn(gone())), return_when=asyncio.FIRST_COMPLETED)
        return result.result() if result.done() else None


def whole(answer: SpeechAnswer, audio: bytes) -> dict[str, Any]:
    """Return a complete answer with its audio, with timestamps and subtitles if they are wanted."""
    return {
        "audio_data": base64.b64encode(audio).decode(),
        "media_type": answer.encoder.format.media_type,
        "sample_rate": answer.encoder.rate,
        "usage": answer.usage,
        **answer.with_warnings,
        **({"segments": answer.timestamps.segments} if answer.timestamps is not None else {}),
        **answer.with_subtitles,
    }


async def events(parts: AsyncGenerator[bytes, None], answer: SpeechAnswer) -> AsyncGenerator[bytes, None]:
    """Yield the parts of an answer as server-sent events: deltas, and the timestamps of segments as these end; then
    `done` with the usage and subtitles, or `error`."""
    started = False
    try:
        async with aclosing(parts):
            async for part in parts:
                started = True
                yield _event({"type": "speech.audio.delta", "audio": base64.b64encode(part).decode()})
                if segments := answer.new_segments():
                    yield _event({"type": "speech.audio.timestamps", "segments": segments})
    except ApiError as error:
        if not started:
            raise
        yield _event({"type": "speech.audio.error", **error.body})
        return
    if segments := answer.new_segments():  # of a last part without audio
        yield _event({"type": "speech.audio.timestamps", "segments": segments})
    yield _event({"type": "speech.audio.done", "usage": answer.usage, **answer.with_warnings, **answer.with_subtitles})


def _event(content: dict[str, Any]) -> bytes:
    return f"event: {content['type']}\ndata: {json.dumps(content)}\n\n".encode()
