"""Two token2wav models in one real tritonserver: streams are spread over them, and one that dies takes only its own."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from cosyvoice_triton import stacks
from cosyvoice_triton.monitoring.health import FAILING
from cosyvoice_triton.monitoring.metrics import STREAMS, page
from cosyvoice_triton.server.serving import HealthPage
from cosyvoice_triton.server.tritonserver import ServerError

from tests.support.serve_process import speak_at_once
from tests.support.server_requests import Serve, process_of
from tests.support.speech_fixtures import until

pytestmark = pytest.mark.server

TEXT, LONG = "word " * 20, "word " * 100  # the second cannot end before a fault
FIRST, SECOND = stacks.DIT.token2wav, f"{stacks.DIT.token2wav}_1"
WAIT_SECONDS = 60.0


class Supervised:
    """A server whose models are watched, as the first process of a container does it."""

    def __init__(self, server: Any, health: HealthPage) -> None:
        self.server, self.health = server, health
        self.end: ServerError | None = None
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def _wait(self) -> None:
        try:
            self.server.wait()
        except ServerError as error:
            self.end = error

    def metric(self, name: str, model: str) -> float:
        lines = page(self.server.metrics_directory).splitlines()
        return next(float(x.split()[-1]) for x in lines if x.startswith(f"{name}{{") and f'model="{model}"' in x)


@pytest.fixture
def supervised(serve: Serve) -> Iterator[Supervised]:
    server = serve(settings={"token2wav_gpus": "0 1", "max_streams": "4"})
    with HealthPage(server, "127.0.0.1", 0) as health:
        health.state = "ready"
        yield Supervised(server, health)


def test_a_replica_that_dies_takes_only_its_own_streams_and_the_last_one_the_server(supervised: Supervised) -> None:
    server, health = supervised.server, supervised.health
    assert health.readiness() == (200, "ready")

    def spread() -> None:
        until(lambda: all(supervised.metric(STREAMS.name, model) == 2 for model in (FIRST, SECOND)))
        os.kill(process_of(server, SECOND), signal.SIGKILL)

    results = asyncio.run(speak_at_once(server.grpc_url, 4, LONG, spread))
    errors = [result.error for result in results if result.error]
    assert len(errors) == 2 and all(SECOND in error for error in errors), errors
    lost = f"the process of model {SECOND} has died"
    until(lambda: health.readiness() == (200, f"ready\n{lost}"))
    until(lambda: supervised.metric(FAILING.name, SECOND) == 1)
    assert supervised.metric(FAILING.name, FIRST) == 0
    assert [result.error for result in asyncio.run(speak_at_once(server.grpc_url, 3, TEXT))] == [None] * 3
    os.kill(process_of(server, FIRST), signal.SIGKILL)
    supervised.thread.join(WAIT_SECONDS)
    assert f"the process of model {FIRST} has died; tritonserver has to be restarted" in str(supervised.end)
