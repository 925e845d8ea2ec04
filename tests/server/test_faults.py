"""Faults in the models of a real server: nothing hangs, one fault is one stream's, and a server that cannot go on ends
at once and says why. tests/soak kills its processes."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cosyvoice_triton.monitoring.environment import TEST_FAULTS
from cosyvoice_triton.monitoring.faults import GPU_ERROR, Fault
from cosyvoice_triton.monitoring.metrics import EVICTED, FAILED, RETRIED, sum_of

from tests.support.serve_process import ServeProcess, StreamResult, rendered, serve_process, speak_at_once
from tests.support.waiting import until

pytestmark = pytest.mark.server

TEXT, LONG = "word " * 20, "word " * 100  # the second cannot end before a fault
STREAMS = 3
END_SECONDS = 30.0  # 1.4 on an idle machine


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("asked")


@pytest.fixture(scope="module")
def server(demo_models: Path, faults: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """The last test ends it."""
    directory = tmp_path_factory.mktemp("faults")
    repository = rendered(demo_models, directory / "repository")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TEST_FAULTS, str(faults))
        with serve_process(repository, directory / "log") as running:
            yield running


def speak(
    server: ServeProcess, streams: int, text: str = TEXT, meanwhile: Callable[[], object] = lambda: None
) -> list[StreamResult]:
    return asyncio.run(speak_at_once(f"127.0.0.1:{server.grpc}", streams, text, meanwhile))


@pytest.mark.parametrize("fault", ["nan_mel", "nan_voice", "nan_logits", "bad_chunk", "out_of_memory"])
def test_a_fault_of_one_chunk_or_row_ends_its_stream_alone(fault: Fault, server: ServeProcess, faults: Path) -> None:
    before = {metric: sum_of(server.page(), metric.name) for metric in (RETRIED, EVICTED, FAILED)}
    (faults / fault).touch()
    results = speak(server, 2 * STREAMS if fault == "out_of_memory" else STREAMS)  # it needs a batch
    assert not list(faults.iterdir()), "it did not happen"
    errors = [result.error for result in results if result.error is not None]
    assert len(errors) == (1 if fault in ("nan_logits", "bad_chunk") else 0), errors
    assert all(result.samples for result in results if result.error is None)
    assert speak(server, 1)[0].error is None
    assert server.readiness() == (200, "ready")
    counted = {metric for metric in before if sum_of(server.page(), metric.name) > before[metric]}
    expected = {"nan_mel": {RETRIED, EVICTED}, "nan_voice": {RETRIED, EVICTED}, "bad_chunk": {FAILED}}
    assert counted == expected.get(fault, set())


def test_a_stopped_model_is_not_ready_and_may_go_on(server: ServeProcess) -> None:
    stopped = server.process_of("speaker_embedding")
    os.kill(stopped, signal.SIGSTOP)
    try:
        until(lambda: server.readiness() == (503, "speaker_embedding hangs"), every=0.1)
    finally:
        os.kill(stopped, signal.SIGCONT)
    until(lambda: server.readiness() == (200, "ready"), every=0.1)


def test_a_gpu_error_ends_the_server_with_its_reason(server: ServeProcess, faults: Path) -> None:
    results = speak(server, STREAMS, LONG, (faults / "gpu_error").touch)
    assert all(result.error is not None for result in results)
    reason = f"model token2wav_dit has failed and cannot recover: {GPU_ERROR}; tritonserver has to be restarted"
    assert server.process.wait(END_SECONDS) == 1
    assert server.process.stderr is not None and reason in server.process.stderr.read()
