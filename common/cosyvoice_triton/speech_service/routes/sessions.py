"""What the WebSockets share: one session reads messages and speaks what waits, at the same time."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from async_timeout import timeout
from fastapi import WebSocket
from starlette.websockets import WebSocketDisconnect

from cosyvoice_triton.speech_service.answer import SpeechAnswer
from cosyvoice_triton.speech_service.bodies import SpeechRequest, parse, read_json
from cosyvoice_triton.speech_service.errors import ApiError, invalid
from cosyvoice_triton.speech_service.security.budget import Claim
from cosyvoice_triton.speech_service.security.guard import KEY_PROTOCOL
from cosyvoice_triton.speech_service.service import Service

_POLICY_VIOLATION, _INTERNAL_ERROR, _TRY_AGAIN_LATER = 1008, 1011, 1013  # close codes of the protocol

logger = logging.getLogger(__name__)


class SocketSessionBase(ABC):
    """One client's connection.

    Reading messages never waits for speaking, so that a cancel takes effect at once.
    """

    handlers: Mapping[str, Callable[[dict[str, Any]], Awaitable[None]]]  # of messages, by their type

    def __init__(self, socket: WebSocket, service: Service) -> None:
        self._socket = socket
        self._service = service
        self._speaker: asyncio.Task[None] | None = None
        self._kept = Claim(socket.app.state.budget)  # what the session remembers
        self._active = time.monotonic()  # when the last message was received or the last audio sent

    @classmethod
    async def serve(cls, socket: WebSocket) -> None:
        """Run a session of this class, unless there are too many, until it ends."""
        service = Service.of(socket)
        # Browsers require one of those that they offer.
        offered: list[str] = socket.scope["subprotocols"]
        await socket.accept(
            next((each for each in offered if not each.startswith(KEY_PROTOCOL)), next(iter(offered), None))
        )
        if service.sessions >= service.settings.max_sessions:
            await socket.close(_TRY_AGAIN_LATER, "the limit of open sessions is reached")
            return
        session = cls(socket, service)
        service.sessions += 1
        try:
            try:
                with service.metrics.sessions.track_inprogress():
                    await session.run()
            finally:
                session._kept.release()
                await session.stop_speaking()
        except WebSocketDisconnect:
            pass
        except asyncio.TimeoutError:
            await session.close_unread()
        finally:
            service.sessions -= 1

    async def run(self) -> None:
        """Handle messages until the client closes the session, disconnects or is idle for too long."""
        idle = self._service.settings.idle
        while True:
            try:
                async with timeout(idle - self._silent):
                    message = await self._socket.receive()
            except asyncio.TimeoutError:
                if self._silent < idle:  # audio was sent, or is being sent, since the wait began
                    continue
                await self._socket.close(1000, "idle")
                return
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(message.get("code", 1000))
            self._active = time.monotonic()
            try:
                if (text := message.get("text")) is None:
                    await self._handle_audio(message["bytes"])
                else:
                    await self._handle(read_json(text.encode(), "the message", self._service.settings))
            except ApiError as error:
                await self._send_error(error)
            await asyncio.sleep(0)  # others have their turn, however many messages wait

    async def _handle(self, fields: dict[str, Any]) -> None:
        """Handle one message. ApiError; WebSocketDisconnect after the last one."""
        kind = fields.pop("type", None)
        if not isinstance(kind, str) or kind not in self.handlers:
            raise invalid(f"the message type {kind!r} is unknown", "type")
        await self.handlers[kind](fields)

    async def _close(self, _: dict[str, Any]) -> None:
        await self.stop_speaking()
        await self._socket.close()
        raise WebSocketDisconnect

    async def _handle_audio(self, data: bytes) -> None:
        """Handle one binary message. ApiError."""
        raise invalid("binary messages are not supported: send JSON")

    @abstractmethod
    async def _speak_next(self) -> bool:
        """Speak one of the things that wait, and return True; return False if nothing waits."""

    async def _send_answer(self, index: dict[str, int], opened: Awaitable[SpeechAnswer], **about: Any) -> None:
        """Send the audio of the answer that `opened` returns, and the messages around it."""
        sent, failed = 0, False
        usage: dict[str, Any] = {}
        try:
            answer = await opened
            audio = {"format": answer.encoder.name, "sample_rate": answer.encoder.rate}
            await self._send("audio.start", **index, **about, **audio)
            async with aclosing(self._service.dispatcher.encoded(answer)) as parts:
                async for part in parts:
                    sent += len(part)
                    async with timeout(self._service.settings.stall):
                        await self._socket.send_bytes(part)
                    await self._send_about(answer, index)
            await self._send_about(answer, index)  # of a last part without audio
            for message in answer.warnings:
                await self._send("warning", **index, message=message)
            usage = {"usage": answer.usage}
        except ApiError as error:
            failed = True
            await self._send_error(error)
        self._answer_ended()
        await self._send("audio.done", **index, total_bytes=sent, error=failed, **usage)

    async def _send_about(self, answer: SpeechAnswer, index: dict[str, int]) -> None:  # noqa: B027  # most have nothing to say
        """Send what is known of the audio that was sent."""

    def _answer_ended(self) -> None:  # noqa: B027
        """Forget what was spoken."""

    async def _send_error(self, error: ApiError) -> None:
        """Tell the client what is wrong with its message."""
        await self._send("error", **error.body)

    def _parsed(self, config: dict[str, Any], text: str = ".") -> SpeechRequest:
        """Return the request for a text with the session's fields. ApiError."""
        wanted: SpeechRequest = parse(SpeechRequest, {**config, "input": text}, self._service.settings)
        return wanted

    def _keep(self, size: int) -> None:
        """Hold so many bytes of the budget until the session ends, in place of those before. ApiError."""
        if not self._kept.covers(size):
            raise ApiError(503, "too much is kept for sessions: try again", code="unavailable", retry_after=1)

    async def _send(self, kind: str, **fields: Any) -> None:
        """Send one message; TimeoutError if the client does not read."""
        async with timeout(self._service.settings.stall):
            await self._socket.send_json({"type": kind, **fields})

    @property
    def _silent(self) -> float:
        """Return the seconds since the last message or audio."""
        return 0.0 if self._speaking else time.monotonic() - self._active

    @property
    def _speaking(self) -> bool:
        return self._speaker is not None and not self._speaker.done()

    def _wake(self) -> None:
        if not self._speaking:
            self._speaker = asyncio.create_task(self._speak())

    async def _speak(self) -> None:
        try:
            while await self._speak_next():
                pass
        except WebSocketDisconnect:
            return
        except asyncio.TimeoutError:
            await self.close_unread()
            return
        except Exception:
            logger.exception("a sentence failed")
            await self._socket.close(_INTERNAL_ERROR, "internal error")
            return
        self._active = time.monotonic()

    async def close_unread(self) -> None:
        """Close the session of a client that does not read."""
        await self._socket.close(_POLICY_VIOLATION, "the client does not read the audio")

    async def stop_speaking(self) -> None:
        """Stop speaking; return once the speaking task has ended."""
        if self._speaker is not None:
            self._speaker.cancel()
            await asyncio.gather(self._speaker, return_exceptions=True)
