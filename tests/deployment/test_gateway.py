"""Envoy in front of two tritonservers: if one dies only its own streams fail; if one is stopped none fails."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tritonclient.grpc.aio as triton
from cosyvoice_triton.monitoring.metrics import ENDED, LIMIT, LIVE, LOAD, sum_of
from cosyvoice_triton.server.tritonserver import free_port
from cosyvoice_triton.speech_service.triton import TritonPool

from tests.support.autoscaler import Autoscaler
from tests.support.gateway import Gateway, Ports, gateway, wait_for
from tests.support.serve_process import MODEL, ServeProcess, StreamResult, rendered, serve_process, synthesize

pytestmark = [pytest.mark.server, pytest.mark.serial]

SHORT = "A short sentence."
LONG = "word " * 24
STREAMS = 8  # few: Triton ends a model's process that does not run for 1.5 s during a request
BEGUN = 4  # before a server dies
NOTICE = "2"  # seconds; the gateway checks each second
DRAIN = "40"  # seconds, far more than a stream takes


@pytest.fixture(scope="module")
def repository(demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With long timeouts, since several streams begin at once on one core."""
    names = ("token_timeout", "model_timeout")
    patience = dict.fromkeys(names, "60")
    return rendered(demo_models, tmp_path_factory.mktemp("gateway") / "repository", **patience)


class Fleet:
    """Two servers that keep their ports across restarts."""

    def __init__(self, repository: Path, directory: Path) -> None:
        self._repository, self._directory = repository, directory
        self._ports = [tuple(free_port() for _ in range(4)) for _ in range(2)]
        self._stacks = [ExitStack(), ExitStack()]
        self.servers: dict[int, ServeProcess] = {}

    def ports(self) -> list[Ports]:
        return [Ports(http, grpc, health) for http, grpc, _, health in self._ports]

    def start(self, index: int) -> None:
        running = serve_process(
            self._repository,
            self._directory / f"log-{index}",
            *("--notice-seconds", NOTICE, "--drain-seconds", DRAIN),
            ports=self._ports[index],
        )
        self.servers[index] = self._stacks[index].enter_context(running)

    def stop(self, index: int) -> None:
        """Send SIGTERM and wait for the end."""
        self.servers[index].terminate()
        assert self.servers[index].process.wait(120) == 0
        self._stacks[index].close()

    def logs(self) -> str:
        """The ends of the servers' logs, which have the stacks of what did not end."""
        return "\n".join(path.read_text()[-20_000:] for path in sorted(self._directory.glob("log-*")))

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
    with gateway(tmp_path_factory.mktemp("envoy"), fleet.ports()) as running:
        wait_for(lambda: running.servers() == 2)
        yield running


def test_the_speech_service_finds_its_model_behind_the_gateway(running_gateway: Gateway) -> None:
    async def run() -> list[str]:
        async with TritonPool([f"127.0.0.1:{running_gateway.grpc}"]) as pool:
            return pool.models

    assert asyncio.run(run()) == [MODEL]


def test_servers_that_are_restarted_or_scaled_under_load_lose_no_stream(running_gateway: Gateway, fleet: Fleet) -> None:
    """The first is restarted. The second goes and comes as the autoscaler says, to which 2.5 listeners are enough."""
    outcomes: list[StreamResult] = []
    limit = sum_of(fleet.servers[0].page(), LIMIT.name)
    autoscaler = Autoscaler(target=2.5 / limit, least=1, most=2, hurry=1e6)

    async def listen(connection: triton.InferenceServerClient, ended: asyncio.Event, pause: float) -> None:
        while not ended.is_set():
            outcomes.append(await synthesize(connection, SHORT, StreamResult()))
            await asyncio.sleep(pause)

    @asynccontextmanager
    async def listeners(count: int, pause: float = 0.0) -> AsyncIterator[None]:
        ended = asyncio.Event()
        async with triton.InferenceServerClient(f"127.0.0.1:{running_gateway.grpc}") as connection:
            tasks = [asyncio.create_task(listen(connection, ended, pause)) for _ in range(count)]
            yield
            ended.set()
            await asyncio.gather(*tasks)

    async def until_wanted(servers: int, of: Sequence[ServeProcess]) -> None:
        wanted = 0
        while wanted != servers:
            await asyncio.sleep(0.1)
            loads = [SimpleNamespace(ready_at=0.0, load=sum_of(each.page(), LOAD.name)) for each in of]
            wanted = autoscaler.replicas(loads, time.monotonic())

    async def stop(index: int) -> None:
        await asyncio.to_thread(fleet.stop, index)
        assert running_gateway.servers() == 1

    async def start(index: int) -> None:
        await asyncio.to_thread(fleet.start, index)
        await asyncio.to_thread(wait_for, lambda: running_gateway.servers() == 2)

    async def run() -> None:
        async with listeners(2, pause=1.5):  # leaves a small machine time to start the next server
            await stop(0)
            await start(0)
            await until_wanted(1, [fleet.servers[0], fleet.servers[1]])
            await stop(1)
            async with listeners(4):
                await until_wanted(2, [fleet.servers[0]])
            await start(1)

    asyncio.run(run())
    if errors := [outcome.error for outcome in outcomes if outcome.error]:
        pytest.fail(f"{errors}\n{fleet.logs()}")
    assert len(outcomes) > 6


def test_if_a_server_dies_only_streams_that_had_begun_there_fail(running_gateway: Gateway, fleet: Fleet) -> None:
    """The last test, because one server is gone after it."""
    ended_before = {index: sum_of(server.page(), ENDED.name) for index, server in fleet.servers.items()}

    def live(index: int) -> float:
        return sum_of(fleet.servers[index].page(), LIVE.name)

    async def run() -> tuple[list[StreamResult], list[StreamResult], int]:
        async with triton.InferenceServerClient(f"127.0.0.1:{running_gateway.grpc}") as connection:
            sent = running_gateway.statistic("upstream_rq_total") + STREAMS
            outcomes = [StreamResult() for _ in range(STREAMS)]
            # Six times as long: those of a quick server must still speak when the last of a slow one has begun.
            speaking = [asyncio.create_task(synthesize(connection, 6 * LONG, each)) for each in outcomes[:BEGUN]]
            await asyncio.gather(*(outcome.begun.wait() for outcome in outcomes[:BEGUN]))
            dying = max(fleet.servers, key=live)  # a stream without a key goes anywhere: the other may have none
            speaking += [asyncio.create_task(synthesize(connection, LONG, outcome)) for outcome in outcomes[BEGUN:]]
            while running_gateway.statistic("upstream_rq_total") < sent:
                await asyncio.sleep(0.01)
            fleet.servers[dying].kill_tritonserver()
            late = [await synthesize(connection, SHORT, StreamResult()) for _ in range(4)]
            await asyncio.gather(*speaking)
        return outcomes, late, dying

    outcomes, late, dead = asyncio.run(run())
    failed = [outcome for outcome in outcomes if outcome.error]
    assert 0 < len(failed) < STREAMS, fleet.logs()

    def broken() -> list[dict[str, Any]]:
        speech = (line for line in running_gateway.accesses() if line["request"].endswith("ModelStreamInfer"))
        return [line for line in speech if line["grpc_status"] != "OK"]

    # The gateway is asked, because a client may lose audio that arrives in the same moment as the stream's reset.
    wait_for(lambda: len(broken()) == len(failed))
    assert all(line["first_byte_ms"] is not None for line in broken())
    assert [outcome.error for outcome in late] == [None] * 4
    staying = 1 - dead
    ended = STREAMS - len(failed) + len(late)
    wait_for(lambda: sum_of(fleet.servers[staying].page(), ENDED.name) - ended_before[staying] == ended)
    assert fleet.servers[dead].process.wait(60) == 1  # non-zero, so that a supervisor starts it again
