"""Faults in the models of a real server, and processes that are killed and stopped: nothing hangs, one fault is one
stream's, and a server that cannot go on ends at once and says why.
"""

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tritonclient.grpc.aio as triton
from cosyvoice_triton.monitoring.environment import TEST_FAULTS
from cosyvoice_triton.monitoring.faults import GPU_ERROR, Fault
from cosyvoice_triton.monitoring.metrics import EVICTED, FAILED, RETRIED, sum_of
from cosyvoice_triton.server import readiness
from cosyvoice_triton.server.tritonserver import free_port

from tests.support.serve_process import VOICE, ServeProcess, StreamResult, rendered, serve_process, synthesize
from tests.support.waiting import until

pytestmark = pytest.mark.server

TEXT, LONG = "word " * 20, "word " * 100  # the second cannot end before a fault
STREAMS = 3
SPEECH_PORT = free_port()
END_SECONDS = 30.0  # 1.4 on an idle machine


@pytest.fixture(scope="module")
def repository(demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rendered(demo_models, tmp_path_factory.mktemp("faults") / "repository", flow_precision="float32")


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("asked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TEST_FAULTS, str(directory))
        yield directory


@pytest.fixture(scope="module")
def servers(
    repository: Path, faults: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], ServeProcess]]:
    """Return the running server; a new one if a test has ended it."""
    running: list[ServeProcess] = []
    voices = tmp_path_factory.mktemp("voices")
    shutil.copy(VOICE, voices / "anna.wav")
    options = ("--speech-port", str(SPEECH_PORT), "--voices", str(voices))
    with contextlib.ExitStack() as stack:

        def current() -> ServeProcess:
            if not running or running[-1].process.poll() is not None:
                log = tmp_path_factory.mktemp("log") / "log"
                running.append(stack.enter_context(serve_process(repository, log, *options)))
                socket.create_connection(("127.0.0.1", SPEECH_PORT)).close()  # it listens when it is announced
            return running[-1]

        yield current


@pytest.fixture
def server(servers: Callable[[], ServeProcess]) -> ServeProcess:
    return servers()


async def speak(
    server: ServeProcess, streams: int, meanwhile: Callable[[], None] = lambda: None, text: str = TEXT
) -> list[StreamResult]:
    """The results of streams that run together; `meanwhile` is called once all have begun."""
    async with triton.InferenceServerClient(f"127.0.0.1:{server.grpc}") as connection:
        results = [StreamResult() for _ in range(streams)]
        speaking = [asyncio.create_task(synthesize(connection, text, result)) for result in results]
        await asyncio.gather(*(result.begun.wait() for result in results))
        meanwhile()
        await asyncio.wait_for(asyncio.gather(*speaking), 60)
    return results


def ended(server: ServeProcess) -> str:
    """What serve.py has printed when it ended by itself, which is soon after the fault."""
    assert server.process.wait(END_SECONDS) == 1
    assert server.process.stderr is not None
    return server.process.stderr.read()


@pytest.mark.parametrize("fault", ["nan_mel", "nan_voice", "nan_logits", "bad_chunk", "out_of_memory"])
def test_a_fault_of_one_chunk_or_row_ends_its_stream_alone(fault: Fault, server: ServeProcess, faults: Path) -> None:
    before = {metric: sum_of(server.page(), metric.name) for metric in (RETRIED, EVICTED, FAILED)}
    (faults / fault).touch()
    results = asyncio.run(speak(server, 2 * STREAMS if fault == "out_of_memory" else STREAMS))  # it needs a batch
    assert not list(faults.iterdir()), "it did not happen"
    errors = [result.error for result in results if result.error is not None]
    assert len(errors) == (1 if fault in ("nan_logits", "bad_chunk") else 0), errors
    assert all(result.samples for result in results if result.error is None)
    assert asyncio.run(speak(server, 1))[0].error is None
    assert server.readiness() == (200, "ready")
    counted = {metric for metric in before if sum_of(server.page(), metric.name) > before[metric]}
    expected = {"nan_mel": {RETRIED, EVICTED}, "nan_voice": {RETRIED, EVICTED}, "bad_chunk": {FAILED}}
    assert counted == expected.get(fault, set())


def test_a_stopped_model_is_not_ready_and_may_go_on(server: ServeProcess) -> None:
    stopped = server.process_of("speaker_embedding")
    os.kill(stopped, signal.SIGSTOP)
    try:
        wait_for_readiness(server, (503, "speaker_embedding hangs"))
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_for_readiness(server, (200, "ready"))


def wait_for_readiness(server: ServeProcess, wanted: tuple[int, str]) -> None:
    until(lambda: server.readiness() == wanted, every=0.1)


def test_a_gpu_error_ends_the_server_with_its_reason(server: ServeProcess, faults: Path) -> None:
    results = asyncio.run(speak(server, STREAMS, (faults / "gpu_error").touch, LONG))
    assert all(result.error is not None for result in results)
    reason = f"model token2wav_dit has failed and cannot recover: {GPU_ERROR}; tritonserver has to be restarted"
    assert reason in ended(server)


def test_when_the_orchestrator_dies_every_request_ends_at_once(server: ServeProcess) -> None:
    url = f"http://127.0.0.1:{SPEECH_PORT}"
    assert readiness.wait([f"{url}/health"], 30) == []
    body = json.dumps({"model": "tts-1", "input": LONG, "voice": "anna", "response_format": "pcm"}).encode()
    request = urllib.request.Request(f"{url}/v1/audio/speech", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.read(1)

        def kill() -> None:
            os.kill(server.process_of("cosyvoice2_dit"), signal.SIGKILL)

        results = asyncio.run(speak(server, STREAMS, kill, LONG))
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()
    assert all(result.error is not None for result in results)
    said = ended(server)
    assert said.endswith("the process of model cosyvoice2_dit has died; tritonserver has to be restarted\n"), said
