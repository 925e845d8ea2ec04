"""HTTP servers on this machine: one whose answers are those of a test, one that sends prepared bytes, with functions
that build them in the OpenAI format, and one that sends back what it is sent."""

import asyncio
import contextlib
import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

from cosyvoice_triton.background import BackgroundLoop

AnyServer = TypeVar("AnyServer", bound=socketserver.BaseServer)


@contextmanager
def running(server: AnyServer) -> Iterator[AnyServer]:
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Page(BaseHTTPRequestHandler):
    """Answers requests of any method, by the `answer` of a subclass."""

    def do_GET(self) -> None:
        self.answer()

    do_POST = do_HEAD = do_GET  # noqa: N815 - names of the base class

    def answer(self) -> None:
        self.reply()

    def body(self) -> bytes:
        """What the client has sent."""
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def reply(self, status: int = 200, content: bytes | object = b"", **headers: str) -> None:
        """Sends an answer; a `content` that is not bytes as JSON."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content_Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


class PageServer(ThreadingHTTPServer):
    daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def http_server(page: type[Page], host: str = "127.0.0.1", kind: type[PageServer] = PageServer) -> Iterator[PageServer]:
    """A running server. kind: a subclass, whose handlers find it as `self.server`."""

    class Server(kind):  # type: ignore[misc, valid-type]
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    with running(Server((host, 0), page)) as server:
        yield server


class _Echo(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        with suppress(ConnectionError):  # the client may have gone
            for line in self.rfile:
                self.wfile.write(line)
                if line == b"\r\n":
                    return


@contextmanager
def echo_server() -> Iterator[int]:
    """The port on loopback."""
    with running(socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Echo)) as server:
        yield server.server_address[1]


def event(text, finish_reason=None, **more):
    content = {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason, **more}]}
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def reply(status, body):
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


class RawHttpServer:
    """Answers each request on loopback with raw bytes; a number in an answer is a pause in seconds."""

    def __init__(self, *answers):
        self.answers = list(answers)  # the last one repeats
        self.bodies = []
        self.live = 0

    @asynccontextmanager
    async def running(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def answer_to(self, body):
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    async def _serve(self, reader, writer):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # the client left before its request
            return writer.close()
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-l"))
        self.bodies.append(json.loads(await reader.readexactly(length)))
        answer = await self.answer_to(self.bodies[-1])
        watch = asyncio.create_task(reader.read(1))  # ends when the client leaves
        self.live += 1
        try:
            for part in answer:
                if isinstance(part, bytes):
                    writer.write(part)
                    await writer.drain()
                else:
                    await asyncio.wait({watch}, timeout=part)
        except ConnectionError:
            pass
        finally:
            self.live -= 1
            watch.cancel()
            writer.close()


TOKENS = 60  # of a good answer
GOOD = [
    STREAM,
    *(event(f"<|s_{token * 7}|>") for token in range(TOKENS)),
    event("<|eos1|>", "stop"),
    b"data: [DONE]\n\n",
]


@contextlib.contextmanager
def llm_server():
    """A server that answers well, whose `answers` may be changed, and its URL."""
    server = RawHttpServer(GOOD)
    with contextlib.closing(BackgroundLoop("llm")) as loop:
        running = server.running()
        yield server, loop.run(running.__aenter__())
        loop.run(running.__aexit__(None, None, None))
