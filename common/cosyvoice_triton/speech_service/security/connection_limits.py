"""uvicorn's HTTP protocol with limits for what arrives before a request reaches the application, and for what a client
leaves unread.

uvicorn with httptools collects headers of any size and waits for the rest of a request for as long as the client likes.
It closes a connection only once the client has read everything, so one that stops reading keeps it, and its memory.
"""

import asyncio
import logging
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cosyvoice_triton.speech_service.settings import Settings

MAX_HEADER_BYTES = 64 << 10
HEADER_SECONDS = 10.0
MAX_MILLISECONDS = (1 << 31) - 1  # of a socket option

logger = logging.getLogger(__name__)


class LimitedProtocol(HttpToolsProtocol):
    """One connection, up to an upgrade to a WebSocket, which has pings instead.

    Headers must have arrived HEADER_SECONDS after the connection or the request has begun, and the body
    `receive_timeout` seconds after its headers. A client that takes nothing of what is sent to it for `stall` seconds,
    also over a WebSocket, loses the connection; one that reads slowly keeps it.
    """

    def __init__(self, settings: Settings, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._receive_timeout = settings.receive_timeout
        self._stall_milliseconds = min(max(1, round(1000 * settings.stall)), MAX_MILLISECONDS)  # 0: no limit
        self._header_seconds = min(HEADER_SECONDS, settings.receive_timeout)
        self._max_bytes = MAX_HEADER_BYTES + 2 * settings.max_body_bytes  # of a request: its chunks have headers too
        self._deadline: asyncio.TimerHandle | None = None
        self._in_headers = True
        self._received = 0  # bytes of these headers, or of this body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of TCP only
        super().connection_made(transport)
        # Only the kernel knows whether the client takes anything (tcp(7)). The option stays after an upgrade.
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._stall_milliseconds)
        self._expect_within(self._header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)  # calls the methods below, which begin to count anew
        if self._received > (MAX_HEADER_BYTES if self._in_headers else self._max_bytes):
            status = 431 if self._in_headers else 413
            logger.info("a request was refused with status %d after %d bytes", status, self._received)
            self.transport.write(STATUS_LINE[status] + b"connection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._deadline is None:  # a later request of the connection
            self._expect_within(self._header_seconds)

    def on_headers_complete(self) -> None:
        self._in_headers, self._received = False, 0
        self._expect_within(self._receive_timeout)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_headers, self._received = True, 0
        self._forget_deadline()
        super().on_message_complete()

    def _expect_within(self, seconds: float) -> None:
        self._forget_deadline()
        self._deadline = self.loop.call_later(seconds, self._too_late, seconds)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self, seconds: float) -> None:
        if self.flow.read_paused:  # by the server: the client cannot send now
            self._expect_within(seconds)
        else:
            self.transport.abort()
