"""Run one tritonserver until it ends or SIGTERM or Ctrl-C arrives: the main process of a container."""

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from urllib.parse import urlsplit

from cosyvoice_triton.server import mps
from cosyvoice_triton.server.supervisor import HealthPage, drain
from cosyvoice_triton.server.tritonserver import ServerError, TritonServer, require_free

LISTEN_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Companion:
    """A service that runs next to tritonserver. `title` and `url` are announced.

    start: takes the running server. The event that it yields is set if the service ends by itself, which also sends
    this process SIGTERM.
    """

    title: str
    url: str
    start: Callable[[TritonServer], contextlib.AbstractContextManager[threading.Event]]

    def listens(self) -> bool:
        address = urlsplit(self.url)
        try:
            socket.create_connection((address.hostname or "", address.port or 0), 1.0).close()
        except OSError:
            return False
        return True


class Terminated(BaseException):
    """SIGTERM was received."""


def raise_on_sigterm() -> None:
    """Let the first SIGTERM raise Terminated in the main thread, later ones KeyboardInterrupt."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def terminate(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, interrupt)
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)


def serve(
    server: TritonServer,
    *,
    health_port: int,
    announce: Callable[[str], None],
    notice_seconds: float,
    drain_seconds: float,
    companion: Companion | None = None,
) -> None:
    """Start `server` and its health page; return after SIGTERM, when the running requests have ended.

    announce: called with the addresses when everything is ready. notice_seconds, drain_seconds: see `supervisor.drain`.
    ServerError if the health page's port is in use, or tritonserver or the companion ended unexpectedly.
    """
    if health_port:
        require_free(health_port, server.host)
    service = contextlib.nullcontext(threading.Event()) if companion is None else companion.start(server)
    page = HealthPage(server, server.host, health_port)
    with page as health, mps.shared_gpu(server.repository), server, service as companion_ended:
        try:
            while companion is not None and not companion.listens() and not companion_ended.wait(LISTEN_POLL_SECONDS):
                pass
            health.state = "ready"
            announce("\n".join(_addresses(server, health, companion)))
            server.wait()
        except Terminated:
            drain(server, health, notice_seconds, drain_seconds)
            if companion is not None and companion_ended.is_set():
                raise ServerError(f"the {companion.title} service ended unexpectedly") from None
            return
        finally:
            health.state = "stopping"
        raise ServerError(f"tritonserver was stopped by another process; see {server.log_file}")


def _addresses(server: TritonServer, health: HealthPage, companion: Companion | None) -> Iterator[str]:
    yield f"ready: http {server.http_url}  grpc {server.grpc_url}  metrics {server.metrics_url}/metrics"
    yield f"health {health.url}/ready"
    if companion is not None:
        yield f"{companion.title} and its page {companion.url}/"
    yield "Ctrl-C to stop"
