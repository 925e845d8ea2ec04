"""deploy/nginx/balance.sh in front of health pages that the tests serve."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.gateway import gateway, wait_for

pytestmark = pytest.mark.skipif(not shutil.which("nginx"), reason="nginx is not installed: apt-get install nginx-light")
NOTICED = 5.0  # seconds


class HealthPage(ThreadingHTTPServer):
    """Ready until `status` changes."""

    status = 200


class Handler(BaseHTTPRequestHandler):
    server: HealthPage

    def do_GET(self) -> None:
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def health_page() -> Iterator[HealthPage]:
    with HealthPage(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT], ids=lambda stop: stop.name)
def test_every_stop_signal_ends_it_soon_and_with_code_0(tmp_path: Path, stop: signal.Signals) -> None:
    """SIGQUIT is the stop signal of nginx's image."""
    with gateway(tmp_path, ["127.0.0.1"], stop=stop):
        start = time.monotonic()
    assert time.monotonic() - start < 5


def test_servers_that_stay_ready_stay_in_the_list(tmp_path: Path) -> None:
    """Two of one host, whose name is resolved for both at the same time."""
    with health_page() as one, health_page() as two:
        servers = [f"127.0.0.1:1:2:{one.server_port}", f"127.0.0.1:1:3:{two.server_port}"]
        with gateway(tmp_path, servers, PROBE_SECONDS="0.01"):
            time.sleep(4)
    assert (tmp_path / "log").read_text().count("ready:") == 1


@pytest.mark.serial
def test_names_that_do_not_resolve_do_not_delay_the_others(tmp_path: Path) -> None:
    """A resolver that gets no answer gives up after ten seconds, for each name."""
    resolver = tmp_path / "bin" / "getent"
    resolver.parent.mkdir()
    resolver.write_text(f'#!/bin/sh\ncase $2 in gone*) sleep 10; exit 2 ;; esac\nexec {shutil.which("getent")} "$@"\n')
    resolver.chmod(0o755)
    path = f"{resolver.parent}:{os.environ['PATH']}"
    with health_page() as page:
        servers = [f"127.0.0.1:1:2:{page.server_port}", "gone-1", "gone-2", "gone-3"]
        with gateway(tmp_path, servers, PATH=path) as running:
            wait_for(lambda: running.servers() == 1, NOTICED)
            page.status = 503
            wait_for(lambda: running.servers() == 0, NOTICED)
