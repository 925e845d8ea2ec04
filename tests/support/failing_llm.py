"""A loopback LLM server that answers correctly or fails in a chosen way."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Mode = Literal["good", "error 500", "ends in the middle", "goes silent", "never answers", "no speech token"]
TOKENS = 60  # of a good answer


@dataclass
class FailingLLM:
    """`mode` may change between requests; `release` ends all waiting handlers."""

    url: str = ""
    mode: Mode = "good"
    release: threading.Event = field(default_factory=threading.Event)

    def body(self) -> Iterator[bytes]:
        """The events of one answer."""
        if self.mode != "no speech token":
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


@contextmanager
def failing_llm() -> Iterator[FailingLLM]:
    llm = FailingLLM()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if llm.mode == "never answers":
                llm.release.wait(30)
                return
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

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    llm.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield llm
    finally:
        llm.release.set()
        server.shutdown()
        thread.join()
        server.server_close()
