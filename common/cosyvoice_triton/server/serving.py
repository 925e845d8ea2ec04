"""Run one tritonserver until it ends or SIGTERM or Ctrl-C arrives: the main process of a container.

Triton reports itself as ready even if a model has died, hangs or fails every request, and while it is stopping. The
health page does not, and draining loses no stream:

    GET /live     200 while this process runs
    GET /ready    200 while new requests are accepted and every model does its work, or a replica in its place; the
                  text names what does not work; otherwise 503 with the reason
    GET /metrics  our models' metrics, see monitoring/metrics.py; Triton's own page has the `nv_...`
"""

import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType
from typing import Literal

from cosyvoice_triton.addresses import join
from cosyvoice_triton.monitoring import metrics
from cosyvoice_triton.server import mps
from cosyvoice_triton.server.tritonserver import ServerError, TritonServer, require_free

logger = logging.getLogger(__name__)

State = Literal["loading", "ready", "stopping"]

DRAIN_POLL_SECONDS = 0.5  # longer than a model takes to publish its numbers
REPORT_SECONDS = 5.0
LISTEN_POLL_SECONDS = 0.1


class HealthPage(ThreadingHTTPServer):
    """`with HealthPage(server, host, port) as health:`; it reports `health.state`. Port 0: any free one."""

    daemon_threads = True

    def __init__(self, server: TritonServer, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.state: State = "loading"
        self._server = server
        self.pages: dict[str, Callable[[], tuple[int, str]]] = {
            "/live": lambda: (200, "live"),
            "/ready": self.readiness,
            "/metrics": lambda: (200, metrics.page(server.metrics_directory)),
        }
        self.url = join(host, self.server_port)
        self._thread = threading.Thread(target=self.serve_forever, name="health", daemon=True)

    def __enter__(self) -> "HealthPage":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def readiness(self) -> tuple[int, str]:
        """Return status and text of /ready."""
        if self.state != "ready":
            return 503, self.state
        if reason := self._server.watch.why_not_ready():
            return 503, reason
        if self._server.answers_ready():
            return 200, "\n".join(["ready", *self._server.watch.lost.values()])
        return 503, "unanswering" if self.state == "ready" else self.state  # it may have changed meanwhile


class _Handler(BaseHTTPRequestHandler):
    server: HealthPage
    timeout = 5  # seconds, for callers that send nothing

    def do_OPTIONS(self) -> None:
        self.send_response(204)
        self.send_header("Allow", "GET, HEAD, OPTIONS")
        self.end_headers()

    def do_GET(self) -> None:
        if self.path not in self.server.pages:
            status, text = 404, f"no page {self.path[:80]!r}; pages: {' '.join(self.server.pages)}"
        else:
            status, text = self.server.pages[self.path]()
        body = f"{text.rstrip()}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - a name of the base class

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: there is a probe every second."""


def drain(server: TritonServer, health: HealthPage, notice: float, limit: float) -> int:
    """Wait for running requests to end, at most `limit` seconds; return how many did not.

    notice: seconds in which new requests are still accepted although the page answers 503, so that load balancers stop
    sending before any request is refused.
    """
    health.state = "stopping"
    logger.warning("stopping: new requests are refused in %g s, running ones have %g s to end", notice, limit)
    time.sleep(notice)
    try:
        server.refuse_new()
    except OSError as error:
        logger.warning("new requests cannot be refused: %s", error)
    begun = reported = time.monotonic()
    live = 0
    while time.monotonic() - begun < limit:
        time.sleep(DRAIN_POLL_SECONDS)  # first of all: the last accepted request may not be published yet
        try:
            server.check_models()
            live = server.live_requests()
        except ServerError as error:
            logger.warning("tritonserver ended before its requests: %s", error)
            return live
        if live == 0:
            logger.warning("all requests ended after %.1f s", time.monotonic() - begun)
            return 0
        if time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            logger.warning("%d requests running, %.0f s left", live, limit - (reported - begun))
    if live:
        logger.warning("%d requests still running after %g s; they end with UNAVAILABLE", live, limit)
        server.write_stacks()
    return live


class Terminated(BaseException):
    """SIGTERM was received."""


def raise_on_sigterm() -> None:
    """Let the first SIGTERM raise Terminated in the main thread, later ones KeyboardInterrupt."""

    def terminate(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)


def serve(
    server: TritonServer,
    *,
    health_port: int,
    announce: Callable[[str], None],
    notice_seconds: float,
    drain_seconds: float,
    speech_port: int | None = None,
    speech: contextlib.AbstractContextManager[threading.Event] | None = None,
) -> None:
    """Start `server` and its health page; return after SIGTERM, when the running requests have ended.

    announce: called with the addresses when everything is ready. notice_seconds, drain_seconds: see `drain`. speech:
    runs the speech service on `speech_port`; the event is set if it ends by itself, which also sends this process
    SIGTERM. ServerError if one of both ports is in use, or tritonserver or the speech service ended unexpectedly.
    """
    for port in (health_port, speech_port):
        if port:  # now: the service begins minutes later, once the models are loaded
            require_free(port, server.host)
    page = HealthPage(server, server.host, health_port)
    service = speech or contextlib.nullcontext(threading.Event())
    with page as health, mps.shared_gpu(server.repository), server, service as speech_ended:
        try:
            while speech_port and not _listens(server.host, speech_port) and not speech_ended.wait(LISTEN_POLL_SECONDS):
                pass
            health.state = "ready"
            announce("\n".join(_addresses(server, health, speech_port)))
            server.wait()
        except Terminated:
            drain(server, health, notice_seconds, drain_seconds)
            if speech_ended.is_set():
                raise ServerError("the speech service ended unexpectedly") from None
            return
        finally:
            health.state = "stopping"
        raise ServerError(f"tritonserver was stopped by another process; see {server.log_file}")


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0):
        return True
    return False


def _addresses(server: TritonServer, health: HealthPage, speech_port: int | None) -> Iterator[str]:
    yield f"ready: http {server.http_url}  grpc {server.grpc_url}  metrics {server.metrics_url}/metrics"
    yield f"health {health.url}/ready"
    if speech_port:
        yield f"speech and its page http://{join(server.host, speech_port)}/"
    yield "Ctrl-C to stop"
