"""nginx in front of two tritonservers: if one dies only its own streams fail; if one is stopped none fails."""

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import tritonclient.grpc.aio as triton

from common.process.metrics import ENDED, LIVE, sum_of
from common.server.tritonserver import free_port
from tests.conftest import ROOT
from tests.support.serve_process import MODEL, ServeProcess, StreamResult, get, rendered, serve_process, synthesize

pytestmark = [
    pytest.mark.server,
    pytest.mark.serial,
    pytest.mark.skipif(not shutil.which("nginx"), reason="nginx is not installed: apt-get install nginx-light"),
]

SHORT = "A short sentence."
LONG = "word " * 24
STREAMS = 50
NOTICE = "2"  # seconds; the gateway checks every second


@dataclass
class Gateway:
    """nginx with the script that updates its list of servers, and its ports."""

    http: int
    grpc: int
    run: Path

    def servers(self) -> int:
        """The number of servers in its list."""
        return (self.run / "servers").read_text().count("tts ")


@contextmanager
def gateway(directory: Path, servers: list[str]) -> Iterator[Gateway]:
    """deploy/nginx with other ports and paths."""
    run, ports = directory / "run", {number: free_port() for number in (8000, 8001, 10086)}
    config = (ROOT / "deploy/nginx/nginx.conf").read_text()
    for number, port in ports.items():
        assert f"listen {number}" in config
        config = config.replace(f"listen {number}", f"listen 127.0.0.1:{port}")
    config = config.replace("/tmp/nginx", str(run)).replace("/etc/nginx/gateway.d", str(directory))
    if os.geteuid() == 0:  # otherwise workers run as the user "nobody", who cannot read pytest's directories
        config = f"user root;\n{config}"
    (directory / "nginx.conf").write_text(config)
    environment = os.environ | {"TTS_SERVERS": " ".join(servers), "SPEECH_SERVERS": f"127.0.0.1:{free_port()}"}
    environment |= {"NGINX_CONF": str(directory / "nginx.conf"), "RUN_DIR": str(run)}
    with (
        (directory / "log").open("wb") as log,
        subprocess.Popen(["sh", ROOT / "deploy/nginx/balance.sh"], env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            wait_for(lambda: answers(f"http://127.0.0.1:{ports[8000]}/gateway/health"))
            yield Gateway(ports[8000], ports[8001], run)
            assert process.poll() is None, (directory / "log").read_text()
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0


def answers(url: str) -> bool:
    try:
        return get(url)[0] == 200
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def repository(demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With long timeouts, since 25 streams begin at once on one core."""
    patience = {name: "60" for name in ("first_token_timeout", "token_timeout", "model_timeout")}
    return rendered(demo_models, tmp_path_factory.mktemp("gateway") / "repository", **patience)


class Fleet:
    """Two servers that keep their ports across restarts."""

    def __init__(self, repository: Path, directory: Path) -> None:
        self._repository, self._directory = repository, directory
        self._ports = [tuple(free_port() for _ in range(4)) for _ in range(2)]
        self._stacks = [ExitStack(), ExitStack()]
        self.servers: dict[int, ServeProcess] = {}

    def names(self) -> list[str]:
        """The format of TTS_SERVERS."""
        return [f"127.0.0.1:{http}:{grpc}:{health}" for http, grpc, _, health in self._ports]

    def start(self, index: int) -> None:
        running = serve_process(
            self._repository, self._directory / f"log-{index}", "--notice-seconds", NOTICE, ports=self._ports[index]
        )
        self.servers[index] = self._stacks[index].enter_context(running)

    def stop(self, index: int) -> None:
        """Send SIGTERM and wait for the end."""
        self.servers[index].terminate()
        assert self.servers[index].process.wait(60) == 0
        self._stacks[index].close()

    def close(self) -> None:
        for stack in self._stacks:
            stack.close()


@pytest.fixture(scope="module")
def fleet(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    servers = Fleet(repository, tmp_path_factory.mktemp("fleet"))
    try:
        with ThreadPoolExecutor() as threads:
            list(threads.map(servers.start, range(2)))
        yield servers
    finally:
        servers.close()


@pytest.fixture(scope="module")
def running_gateway(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("nginx"), fleet.names()) as running:
        wait_for(lambda: running.servers() == 2)
        yield running


def test_the_gateway_offers_speech_and_no_management(running_gateway: Gateway) -> None:
    base = f"http://127.0.0.1:{running_gateway.http}/v2"
    assert get(f"{base}/health/ready")[0] == 200
    assert get(f"{base}/models/{MODEL}/ready")[0] == 200
    for closed in ("/repository/index", "/systemsharedmemory/status", "/models/token2wav_dit/ready", "/logging"):
        assert get(base + closed)[0] == 404, closed
    assert get(f"http://127.0.0.1:{running_gateway.http}/metrics")[0] == 404

    async def run() -> None:
        async with triton.InferenceServerClient(f"127.0.0.1:{running_gateway.grpc}") as connection:
            assert await connection.is_model_ready(MODEL)
            with pytest.raises(Exception, match="not offered here"):
                await connection.get_model_repository_index()

    asyncio.run(run())


def test_a_rolling_restart_under_load_loses_no_stream(running_gateway: Gateway, fleet: Fleet) -> None:
    outcomes: list[StreamResult] = []

    async def listen(connection: triton.InferenceServerClient, ended: asyncio.Event) -> None:
        while not ended.is_set():
            outcomes.append(await synthesize(connection, SHORT, StreamResult()))
            await asyncio.sleep(1.5)  # leaves a small machine time to start the next server

    async def run() -> None:
        ended = asyncio.Event()
        async with triton.InferenceServerClient(f"127.0.0.1:{running_gateway.grpc}") as connection:
            listeners = [asyncio.create_task(listen(connection, ended)) for _ in range(2)]
            for index in range(2):
                await asyncio.to_thread(fleet.stop, index)
                assert running_gateway.servers() == 1
                await asyncio.to_thread(fleet.start, index)
                await asyncio.to_thread(wait_for, lambda: running_gateway.servers() == 2)
            ended.set()
            await asyncio.gather(*listeners)

    asyncio.run(run())
    assert [outcome.error for outcome in outcomes if outcome.error] == []
    assert len(outcomes) > 6


def test_if_a_server_dies_only_its_own_streams_fail(running_gateway: Gateway, fleet: Fleet) -> None:
    """The last test, because one server is gone after it."""
    dying, staying = fleet.servers[0], fleet.servers[1]
    ended_before = sum_of(staying.page(), ENDED.name)

    async def run() -> tuple[list[StreamResult], list[StreamResult], int]:
        async with triton.InferenceServerClient(f"127.0.0.1:{running_gateway.grpc}") as connection:
            outcomes = [StreamResult() for _ in range(STREAMS)]
            speaking = [asyncio.create_task(synthesize(connection, LONG, outcome)) for outcome in outcomes]
            await asyncio.gather(*(outcome.begun.wait() for outcome in outcomes))
            live = int(sum_of(dying.page(), LIVE.name))
            dying.kill_tritonserver()
            # Until its next check the gateway may still choose the dead server and answer "try again".
            await asyncio.to_thread(wait_for, lambda: running_gateway.servers() == 1)
            late = [await synthesize(connection, SHORT, StreamResult()) for _ in range(4)]
            await asyncio.gather(*speaking)
        return outcomes, late, live

    outcomes, late, live = asyncio.run(run())
    failed = [outcome for outcome in outcomes if outcome.error]
    assert (
        len(failed) > STREAMS // 5 and live - 3 <= len(failed) <= live
    )  # the metrics are up to a quarter of a second old
    assert [outcome.error for outcome in late] == [None] * 4
    time.sleep(1)
    page = staying.page()
    assert sum_of(page, ENDED.name) - ended_before == STREAMS - len(failed) + len(late)
    assert dying.process.wait(20) == 1  # non-zero, so that a supervisor starts it again
