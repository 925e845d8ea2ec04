"""deploy/nginx/balance.sh in front of health pages that the tests serve."""

import asyncio
import os
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc.aio as triton
from cosyvoice_triton.client.grpc_client import chunks
from cosyvoice_triton.client.requests import Utterance
from tritonclient.utils import InferenceServerException

from tests.support.gateway import Gateway, gateway, wait_for
from tests.support.serve_process import MODEL, get

pytestmark = pytest.mark.skipif(not shutil.which("nginx"), reason="nginx is not installed: apt-get install nginx-light")
NOTICED = 5.0  # seconds
SLOW = f"/v2/models/{MODEL}"
REFUSALS = 30


class HealthPage(ThreadingHTTPServer):
    """Ready until `status` changes. SLOW is answered when `released` is set."""

    status, probes = 200, 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.released = threading.Event(), threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: HealthPage

    def do_GET(self) -> None:
        if self.path == SLOW:
            self.server.asked.set()
            self.server.released.wait(60)
        self.server.probes += 1
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def health_page() -> Iterator[HealthPage]:
    with HealthPage() as server:
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
    assert time.monotonic() - start < 30  # the gateway waits a minute for streams that do not end


def test_until_the_last_stream_has_ended_a_stopped_gateway_answers_that_no_server_is_ready(tmp_path: Path) -> None:
    def refusals(running: Gateway, page: HealthPage) -> tuple[str | None, set[str | None]]:
        try:
            url = f"http://127.0.0.1:{running.http}/v2/health/ready"
            wait_for(lambda: get(url)[0] == 503)
            with pytest.raises(urllib.error.HTTPError) as refused, urllib.request.urlopen(url):
                pass
            refused.value.close()
            return refused.value.headers["Retry-After"], {asyncio.run(status(running)) for _ in range(REFUSALS)}
        finally:
            page.released.set()

    async def status(running: Gateway) -> str | None:
        """Of a stream. grpc.aio loses it in one of ten refusals, which the client must know."""
        async with triton.InferenceServerClient(f"127.0.0.1:{running.grpc}") as connection:
            try:
                async for _ in chunks(connection, MODEL, Utterance("Hello.", speaker="anyone"), 30.0):
                    pass
            except grpc.aio.AioRpcError as error:
                return str(error.code())
            except InferenceServerException as error:
                return str(error.status())
        return None

    with ThreadPoolExecutor() as threads, health_page() as page:
        port = page.server_port
        with gateway(tmp_path, [f"127.0.0.1:{port}:2:{port}"], stop=signal.SIGQUIT) as running:
            wait_for(lambda: running.servers() == 1)
            live = threads.submit(urllib.request.urlopen, f"http://127.0.0.1:{running.http}{SLOW}", timeout=60)
            assert page.asked.wait(10)
            refused = threads.submit(refusals, running, page)
        with live.result() as answer:
            assert answer.status == 200
        assert refused.result() == ("2", {str(grpc.StatusCode.UNAVAILABLE)})


def test_servers_that_stay_ready_stay_in_the_list(tmp_path: Path) -> None:
    """Two of one host, whose name is resolved for both at the same time."""
    with health_page() as one, health_page() as two:
        servers = [f"127.0.0.1:1:2:{one.server_port}", f"127.0.0.1:1:3:{two.server_port}"]
        with gateway(tmp_path, servers, PROBE_SECONDS="0.01"):
            wait_for(lambda: min(one.probes, two.probes) > 100, 120)
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
