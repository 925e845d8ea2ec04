"""HTTP servers on this machine whose answers are those of a test."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


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

    with Server((host, 0), page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
