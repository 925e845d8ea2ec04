"""Two token2wav models in one real tritonserver: streams are spread over them, and one that dies takes only its own."""

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest
from cosyvoice_triton import stacks
from cosyvoice_triton.monitoring.health import FAILING
from cosyvoice_triton.monitoring.metrics import STREAMS

from tests.support.serve_process import rendered, serve_process, speak_at_once
from tests.support.speech_fixtures import until

pytestmark = pytest.mark.server

TEXT, LONG = "word " * 20, "word " * 100  # the second cannot end before a fault
FIRST, SECOND = stacks.DIT.token2wav, f"{stacks.DIT.token2wav}_1"


def test_a_replica_that_dies_takes_only_its_own_streams_and_the_last_one_the_server(demo_models, tmp_path: Path):
    repository = rendered(demo_models, tmp_path / "repository", token2wav_gpus="0 1", max_streams="4")
    with serve_process(repository, tmp_path / "log") as server:
        address = f"127.0.0.1:{server.grpc}"
        assert server.readiness() == (200, "ready")

        def values(name: str) -> list[float]:
            found = (
                re.search(rf'^{name}{{model="{model}",.* (\S+)$', server.page(), re.M) for model in (FIRST, SECOND)
            )
            return [float(each[1]) for each in found if each]

        def spread() -> None:
            until(lambda: values(STREAMS.name) == [2, 2])
            os.kill(server.process_of(SECOND), signal.SIGKILL)

        results = asyncio.run(speak_at_once(address, 4, LONG, spread))
        errors = [result.error for result in results if result.error]
        assert len(errors) == 2 and all(SECOND in error for error in errors), errors
        lost = f"the process of model {SECOND} has died"
        until(lambda: server.readiness() == (200, f"ready\n{lost}"))
        until(lambda: values(FAILING.name) == [0, 1])
        assert [result.error for result in asyncio.run(speak_at_once(address, 3, TEXT))] == [None] * 3
        os.kill(server.process_of(FIRST), signal.SIGKILL)
        assert server.process.wait(60) == 1 and server.process.stderr is not None
        said = server.process.stderr.read()
        assert f"the process of model {FIRST} has died; tritonserver has to be restarted" in said
