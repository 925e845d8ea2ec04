"""What stands over one tritonserver: a health page that tells the truth, and an end that loses no stream.

Triton answers `ready` when a model's process has died and while it is being stopped. The health page does not:

    GET /live     200 while this process runs
    GET /ready    200 while new requests are taken; 503 with the reason, one word, otherwise
    GET /metrics  what our models count, see `metrics`; Triton's own page has its `nv_...`
"""

import logging
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Literal

from common.process import metrics
from common.server.installation import ServerError
from common.server.tritonserver import TritonServer

logger = logging.getLogger(__name__)

State = Literal["loading", "ready", "stopping"]

DRAIN_POLL_SECONDS = 0.5  # longer than a model takes to publish its numbers
REPORT_SECONDS = 5.0


class HealthPage:
    """`with HealthPage(server, host, port) as health:`; `health.state` is what it tells. Port 0: any free one."""

    def __init__(self, server: TritonServer, host: str, port: int) -> None:
        self.state: State = "loading"
        self._server = server
        self.pages: dict[str, Callable[[], tuple[int, str]]] = {
            "/live": lambda: (200, "live"),
            "/ready": self.readiness,
            "/metrics": lambda: (200, metrics.page(server.metrics_directory)),
        }
        self._pages = ThreadingHTTPServer((host, port), self._handler())
        self._pages.daemon_threads = True
        self.url = f"{host}:{self._pages.server_port}"
        self._thread = threading.Thread(target=self._pages.serve_forever, name="health", daemon=True)

    def __enter__(self) -> "HealthPage":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pages.shutdown()
        self._pages.server_close()
        self._thread.join()

    def readiness(self) -> tuple[int, str]:
        """Status and text of /ready."""
        if self.state != "ready":
            return 503, self.state
        return (200, "ready") if self._server.answers_ready() else (503, "unanswering")

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        page = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 5  # of a caller that sends nothing

            def do_GET(self) -> None:
                if self.path not in page.pages:
                    status, text = 404, f"no page {self.path[:80]!r}; there are {' '.join(page.pages)}"
                else:
                    status, text = page.pages[self.path]()
                body = f"{text.rstrip()}\n".encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: a probe each second is no news."""

        return Handler


def drain(server: TritonServer, health: HealthPage, notice: float, limit: float) -> int:
    """Let live requests end; how many had not within `limit` seconds.

    `notice`: seconds in which new requests are still taken although the page says 503, so that balancers send theirs
    elsewhere before any is refused.
    """
    health.state = "stopping"
    logger.warning("stopping: new requests are refused in %g s, live ones have %g s to end", notice, limit)
    time.sleep(notice)
    server.refuse_new()
    begun = reported = time.monotonic()
    live, empty = 0, 0
    while time.monotonic() - begun < limit:
        try:
            live = server.live_requests()
        except ServerError:
            logger.warning("tritonserver ended before its requests did")
            return live
        empty = empty + 1 if live == 0 else 0
        if empty == 2:  # the first may be older than the last request that was taken
            logger.warning("no request lives after %.1f s", time.monotonic() - begun)
            return 0
        if time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            logger.warning("%d requests live, %.0f s left", live, limit - (reported - begun))
        time.sleep(DRAIN_POLL_SECONDS)
    if live:
        logger.warning("%d requests live after %g s; they end with UNAVAILABLE", live, limit)
    return live
