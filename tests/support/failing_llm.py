"""A loopback LLM server that answers correctly or fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from tests.support.http_pages import Page, PageServer, http_server
from tests.support.raw_http_server import event

TOKENS = 60  # of a good answer


class FailingLLM(PageServer):
    """`mode` may change between requests."""

    mode: Literal["good", "error 500"] = "good"


class _Completions(Page):
    server: FailingLLM

    def answer(self) -> None:
        self.body()
        if self.server.mode == "error 500":
            self.send_error(500, "out of memory")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()  # HTTP/1.0: the answer ends with the connection
        for token in range(TOKENS):
            self.wfile.write(event(f"<|s_{token * 7}|>"))
        self.wfile.write(event("<|eos1|>", "stop") + b"data: [DONE]\n\n")


@contextmanager
def failing_llm() -> Iterator[FailingLLM]:
    with http_server(_Completions, kind=FailingLLM) as llm:
        assert isinstance(llm, FailingLLM)
        yield llm
