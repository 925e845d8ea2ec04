"""uvicorn's protocols with limits for what arrives before the application sees it, and for what a client leaves unread.

uvicorn with httptools collects headers of any size and waits for the rest of a request for as long as the client likes.
It closes a connection only once the client has read everything, so one that stops reading keeps it, and its memory. It
drops the body of a request that offers an upgrade, and answers what follows as a second request. A WebSocket collects
an unfinished message for as long as the client likes, and answers the pings of a client that reads nothing.

uvicorn has no public interface for any of this. This is the only file that uses its private classes, and
tests/speech_service/test_connections.py names the release that it was read from.
"""

import asyncio
import logging
import socket
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from cosyvoice_triton.speech_service.security.budget import ByteBudget, Claim
from cosyvoice_triton.speech_service.settings import Settings

MAX_HEADER_BYTES = 64 << 10  # Envoy passes on 60 KiB
HEADER_SECONDS = 10.0  # a few packets, also on a slow network
LINGER_SECONDS = 30.0  # nginx's lingering_time
MAX_MILLISECONDS = (1 << 31) - 1  # of a socket option, which is an int
# Requests that wait for the answer before theirs. uvicorn reads on after each answer, so without a limit half a million
# that a client sent without reading took 960 MB.
MAX_PIPELINED = 100

SOCKET_PATHS = b"/v1/audio/speech/stream", b"/v1/audio/voice-conversion/stream", b"/v1/realtime"
# Headers of an offer to upgrade, which a server that does not take it ignores (RFC 9110, 7.8).
_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")
SLICE_BYTES = 1024  # parsed at once, a frame has 6 bytes at least
FRAMES_PER_TURN = 32  # after so many others have a turn
MAX_FRAMES, FRAMES_PER_SECOND = 20_000, 1000  # of a WebSocket at once, and in the long run
_FRAGMENT_BYTES = 128  # of memory for a piece of a message, also for an empty one
_PONG = 0x8A  # first byte of its frame

logger = logging.getLogger(__name__)


class _LingeringTransport:
    """What uvicorn answers a request through. Closing a connection whose client still sends would be a reset, which
    takes the answer away that the client has not read yet: the rest is read and dropped, for LINGER_SECONDS."""

    def __init__(self, protocol: "LimitedProtocol") -> None:
        self._protocol = protocol
        self.is_closing = protocol.transport.is_closing

    def write(self, data: bytes) -> None:
        self._protocol.transport.write(data)
        self._protocol.count_unsent()

    def close(self) -> None:
        self._protocol.close_after_body()


class LimitedProtocol(HttpToolsProtocol):
    """One connection, up to an upgrade to a WebSocket, which has pings instead.

    Headers must have arrived HEADER_SECONDS after the connection or the request has begun, and the body
    `receive_timeout` seconds after its headers. A client that takes nothing of what is sent to it for `stall` seconds,
    also over a WebSocket, loses the connection; one that reads slowly keeps it, as long as all that is not sent yet
    fits the budget of the bodies.
    """

    def __init__(self, settings: Settings, budget: ByteBudget, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._unsent = Claim(budget)
        self._receive_timeout = settings.receive_timeout
        self._stall_milliseconds = min(max(1, round(1000 * settings.stall)), MAX_MILLISECONDS)  # 0: no limit
        self._header_seconds = min(HEADER_SECONDS, settings.receive_timeout)
        self._max_bytes = MAX_HEADER_BYTES + 2 * settings.max_body_bytes  # of a request: its chunks have headers too
        self._deadline: asyncio.TimerHandle | None = None
        self._in_headers = True
        self._ignores_upgrade = False  # the request offers an upgrade that is not taken
        self._lingers = False  # answered, and to be closed
        self._received = 0  # bytes of these headers, or of this body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of TCP only
        super().connection_made(transport)
        # Only the kernel knows whether the client takes anything (tcp(7)). The option stays after an upgrade.
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._stall_milliseconds)
        self._set_deadline(self._header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        self._unsent.release()
        super().connection_lost(exc)

    def count_unsent(self) -> None:
        """Hold what the client has not read yet; without room for it, close the connection."""
        if not self._unsent.covers(self.transport.get_write_buffer_size()):
            logger.info("an answer was dropped: the answers that clients do not read take too much memory")
            self.transport.abort()

    def resume_writing(self) -> None:
        self._unsent.release()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        self._parse(data)  # calls the methods below, which begin to count anew
        if self._received > (MAX_HEADER_BYTES if self._in_headers else self._max_bytes):
            status = 431 if self._in_headers else 413
            logger.info("a request was refused with status %d after %d bytes", status, self._received)
            if not self._lingers:
                self.transport.write(STATUS_LINE[status] + b"connection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self._ignores_upgrade:
                self._parse_without_upgrade(data[offer.args[0] :])
            elif self._should_upgrade():
                self.handle_websocket_upgrade()
            else:  # HTTP/2 without an upgrade
                self.send_400_response("Only HTTP/1.1 is served.")
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        finally:
            self._unset_keepalive_if_required()

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Parse the request anew without its offer: httptools takes what follows an offer for another protocol."""
        self._ignores_upgrade = False
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(each for each in value.split(b",") if each.strip().lower() not in _UPGRADE_HEADERS)
            if name not in _UPGRADE_HEADERS:
                lines.append(b"%s: %s" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self._parse(b"\r\n".join([*lines, b"", b""]) + rest)

    def _should_upgrade(self) -> bool:
        """Return whether the offer is taken: a WebSocket at a route that has one, in a request that `websockets` can
        decode."""
        path = self.url.partition(b"?")[0]
        readable = all(value.isascii() for name, value in self.headers if name.startswith(b"sec-websocket-"))
        return bool(
            super()._should_upgrade() and self.parser.get_method() == b"GET" and path in SOCKET_PATHS and readable
        )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._deadline is None:  # a later request of the connection
            self._set_deadline(self._header_seconds)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise httptools.HttpParserError(f"more than {MAX_PIPELINED} requests wait for their answers")
        if self.parser.should_upgrade() and self.parser.get_method() == b"CONNECT":
            return  # no proxy: `_parse` refuses it
        if self.parser.should_upgrade() and not self._should_upgrade():
            self._ignores_upgrade = True
            return
        self._in_headers, self._received = False, 0
        self._set_deadline(self._receive_timeout)
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.transport = _LingeringTransport(self)  # type: ignore[assignment]  # all that a cycle uses
        super()._start_asgi_task(cycle, app)

    def close_after_body(self) -> None:
        """Close the connection, once the body of the current request has arrived."""
        if self._in_headers or self.transport.is_closing():
            self.transport.close()
        else:
            self._lingers = True
            self.transport.write_eof()
            self.flow.resume_reading()
            self._set_deadline(LINGER_SECONDS)

    def on_message_complete(self) -> None:
        if self._ignores_upgrade:
            return
        self._in_headers, self._received = True, 0
        self._clear_deadline()
        super().on_message_complete()
        if self._lingers:
            self.transport.close()

    def _set_deadline(self, seconds: float) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(seconds, self._on_timeout, seconds)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_timeout(self, seconds: float) -> None:
        if self.flow.read_paused:  # by the server: the client cannot send now
            self._set_deadline(seconds)
        else:
            self.transport.abort()


class LimitedSocket(WebSocketsSansIOProtocol):
    """One WebSocket.

    A message must be complete `receive_timeout` seconds after its first byte, and all that are not share a budget with
    the unfinished bodies. Pings of a client that reads nothing are not answered. Of many frames few are handled in a
    turn of the loop, and only once the messages before them are, so that one client takes its share of the time; one
    that goes on sending more of them than anybody writes loses the connection.
    """

    def __init__(self, settings: Settings, budget: ByteBudget, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._receive_timeout = settings.receive_timeout
        self._claim = Claim(budget)
        self._fragments = 0  # pieces of an unfinished message that have been counted
        self._fragment_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._unread = bytearray()  # received, and left for later turns
        self._turn: asyncio.Handle | None = None  # the next one
        self._frames = 0  # of this turn
        self._allowed, self._counted = float(MAX_FRAMES), self.loop.time()  # further frames; when that was known

    def connection_lost(self, exc: Exception | None) -> None:
        self._unread.clear()
        self._finished()
        super().connection_lost(exc)

    async def receive(self) -> Any:
        """Return the next message as uvicorn does, but go on with what was received before reading more."""
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._go_on()
        return message

    async def send(self, message: Any) -> None:
        """Send a message as uvicorn does. A client that was refused meanwhile counts as one that has left."""
        try:
            await super().send(message)
        except RuntimeError:
            if not self.close_sent:
                raise
            if message["type"] != "websocket.close":
                raise ClientDisconnected from None

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if self._turn is None:
            self._take_turn()

    def _take_turn(self) -> None:
        self._turn, self._frames, read = None, 0, 0
        while read < len(self._unread) and self._frames < FRAMES_PER_TURN and not self.read_paused:
            self._parse(bytes(self._unread[read : read + SLICE_BYTES]))
            read += SLICE_BYTES
        del self._unread[:read]
        if self._unread and not self.transport.is_closing():
            self.transport.pause_reading()
            if not self.read_paused:  # otherwise once the application has taken its messages
                self._go_on()
        elif not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _go_on(self) -> None:
        if self._turn is None:
            self._turn = self.loop.call_soon(self._take_turn)

    def handle_events(self) -> None:
        """Count the frames, then pass them on."""
        new, now = len(self.conn.events), self.loop.time()
        self._frames += new
        self._allowed = min(self._allowed + (now - self._counted) * FRAMES_PER_SECOND, MAX_FRAMES) - new
        self._counted = now
        if self._allowed < 0:
            self._refuse(1008, f"more than {FRAMES_PER_SECOND} messages a second")
        else:
            super().handle_events()

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # It has a body, or too many or too long lines; uvicorn would not answer.
            self.close_sent = True
            self.transport.write(STATUS_LINE[400] + b"connection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()
            return
        new = self.frames[self._fragments :]  # the others are counted: a client may send a million pieces
        self._fragments += len(new)
        self._fragment_bytes += sum(len(each) + _FRAGMENT_BYTES for each in new)
        unfinished = len(self.conn.reader.buffer) + self._fragment_bytes
        if not unfinished:
            self._finished()
        elif not self._claim.covers(unfinished):
            self._refuse(1013, "too many unfinished messages: try again")
        elif self._deadline is None:
            self._deadline = self.loop.call_later(
                self._receive_timeout, self._refuse, 1008, "a message did not arrive in time"
            )

    def send_receive_event_to_app(self) -> None:
        """Pass on a message; uvicorn logs a traceback for a text that is not UTF-8."""
        self._finished()
        if self.curr_msg_data_type == "text":
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self._refuse(1007, "the message is not UTF-8")
                return
        super().send_receive_event_to_app()

    def handle_pong(self, event: Frame) -> None:
        self._control_frame()
        super().handle_pong(event)

    def handle_ping(self) -> None:
        self._control_frame()
        output = self.conn.data_to_send()
        if not self.writable.is_set():  # RFC 6455, 5.5.3: not every ping needs an answer
            output = [frame for frame in output if frame[:1] != bytes([_PONG])]
        self.transport.write(b"".join(output))

    def _control_frame(self) -> None:
        if not self.frames:  # what had begun to arrive was this frame, and no message
            self._finished()

    def _finished(self) -> None:
        """Forget the message that was unfinished."""
        self._fragments = self._fragment_bytes = 0
        self._claim.release()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, code: int, reason: str) -> None:
        self._finished()
        if not self.close_sent and not self.transport.is_closing():
            self.conn.fail(code, reason)
            self.handle_parser_exception()
        self.frames = []
        self._unread.clear()
        self.conn.reader.buffer.clear()
