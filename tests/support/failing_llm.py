"""A loopback LLM server that answers correctly or fails in a chosen way."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Mode = Literal["good", "error 500", "ends in the middle", "goes silent"]
TOKENS = 60  # of a good answer


@dataclass
class FailingLLM:
    """`mode` may change between requests; `release` ends all waiting handlers. It keeps its port across restarts."""

    port: int = 0
    mode: Mode = "good"
    release: threading.Event = field(default_factory=threading.Event)
    _server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.release = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler())
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever).start()

    def stop(self) -> None:
        """From now on connections are refused."""
        if self._server is not None:
            self.release.set()
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def body(self) -> Iterator[bytes]:
        """The events of one answer."""
        for token in range(TOKENS):
            yield self.event(f"<|s_{token * 7}|>", None)
            if self.mode in ("ends in the middle", "goes silent") and token == 5:
                return
        yield self.event("<|eos1|>", "stop")
        yield b"data: [DONE]\n\n"

    @staticmethod
    def event(text: str, finish_reason: str | None) -> bytes:
        choice = {"index": 0, "text": text, "finish_reason": finish_reason}
        return f"data: {json.dumps({'object': 'text_completion', 'choices': [choice]})}\n\n".encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        llm = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                if llm.mode == "error 500":
                    self.send_error(500, "out of memory")
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()  # HTTP/1.0: the answer ends with the connection
                for event in llm.body():
                    self.wfile.write(event)
                if llm.mode == "goes silent":
                    self.wfile.flush()
                    llm.release.wait(30)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        return Handler


@contextmanager
def failing_llm() -> Iterator[FailingLLM]:
    llm = FailingLLM()
    llm.start()
    try:
        yield llm
    finally:
        llm.stop()
