"""cli/serve.py in its own process, as a container runs it, with the demo checkpoint; and requests to it."""

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2 as httpx
import pytest
import tritonclient.grpc.aio as triton
from cosyvoice_triton import samples, stacks
from cosyvoice_triton.client.grpc_client import chunks
from cosyvoice_triton.client.utterance import Utterance, of_recording, read_reference
from cosyvoice_triton.server.options import StackOptions
from cosyvoice_triton.server.rendering import render
from tritonclient.utils import InferenceServerException

from tests.conftest import ROOT

MODEL = stacks.DIT.orchestrator
VOICE = samples.FOLDER / "reference_en.wav"
STREAM_SECONDS = 90.0


IDLE = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
CONFIG = """
name: "idle" backend: "python" max_batch_size: 1 instance_group [ { kind: KIND_CPU count: 1 } ]
input [ { name: "x" data_type: TYPE_FP32 dims: [1] } ] output [ { name: "y" data_type: TYPE_FP32 dims: [1] } ]
"""


def with_model(repository: Path, name: str = "idle", code: str = IDLE) -> Path:
    """The repository, with a model that has this code; by default it loads and does nothing."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "1" / "model.py").write_text(code)
    (repository / name / "config.pbtxt").write_text(CONFIG.replace("idle", name))
    return repository


@dataclass
class ServeProcess:
    """A running serve.py, its ports and what it has printed."""

    process: subprocess.Popen[str]
    http: int
    grpc: int
    metrics: int
    health: int
    log: Path
    printed: str

    def readiness(self) -> tuple[int, str]:
        """Status and text of the health page."""
        return get(f"http://127.0.0.1:{self.health}/ready")

    def page(self) -> str:
        return get(f"http://127.0.0.1:{self.health}/metrics")[1]

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def process_of(self, model: str) -> int:
        (tritonserver,) = children(self.process.pid, "bin/tritonserver")
        (stub,) = children(tritonserver, f"/{model}/1/model.py")
        return stub


def children(process: int, command: str = "") -> list[int]:
    """The processes that a process has started, those with this in their command line."""
    found = subprocess.run(["pgrep", "-P", str(process), "-f", command], capture_output=True, text=True)
    return [int(child) for child in found.stdout.split()]


def get(url: str) -> tuple[int, str]:
    """Status and text of a page."""
    answer = httpx.get(url, timeout=10)
    return answer.status_code, answer.text.strip()


def rendered(models: Path, directory: Path, **settings: str) -> Path:
    """The dit stack with the demo checkpoint, all models in one tritonserver."""
    defaults = {"flow_precision": "float32", "sampling": "triton", "profile": "unlimited", "model_timeout": "60"}
    settings = defaults | settings  # see conftest.py's `serve`
    render(StackOptions(models_dir=models, stack=stacks.DIT.name, device="cpu", settings=settings), directory)
    return directory


@contextmanager
def serve_process(repository: Path, log: Path, *options: str) -> Iterator[ServeProcess]:
    """serve.py with `repository`, ready; stopped at the end of the block."""
    command = [sys.executable, "-X", "faulthandler", "-m", "cosyvoice_triton", "serve", str(repository)]
    command += ["--log-file", str(log), *options]
    for name in ("http", "grpc", "metrics", "health"):
        command += [f"--{name}-port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            printed = ""
            while "Ctrl-C" not in (line := process.stdout.readline()):
                assert line, f"it ended: {printed}{process.stderr.read()}"
                printed += line
            found = {name: int(port) for name, port in re.findall(r"(http|grpc|metrics|health) \S+:(\d+)", printed)}
            yield ServeProcess(process, **found, log=log, printed=printed)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)  # about 6 s on an idle machine
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # faulthandler prints where each thread is
                pytest.fail(f"serve.py did not end within 60 s of SIGINT:\n{process.communicate()[1]}")


@dataclass
class StreamResult:
    """The result of one stream. `begun` is set once the first audio has arrived."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    samples: int = 0
    error: str | None = None


async def synthesize(
    connection: triton.InferenceServerClient, model: str, request: Utterance, outcome: StreamResult, seconds: float
) -> StreamResult:
    """One stream until its end or error."""
    try:
        async for part in chunks(connection, model, request, seconds):
            outcome.begun.set()
            outcome.samples += part.waveform.size
    except InferenceServerException as error:
        outcome.error = str(error)
    outcome.begun.set()
    return outcome


async def speak_at_once(
    address: str, count: int, text: str, meanwhile: Callable[[], object] = lambda: None
) -> list[StreamResult]:
    """The results of so many streams; `meanwhile` is called in a thread once each has begun."""
    results = [StreamResult() for _ in range(count)]
    request = Utterance(text, **of_recording(read_reference(VOICE)), parameters={"seed": 1})
    async with triton.InferenceServerClient(address) as connection:
        streams = [synthesize(connection, MODEL, request, result, STREAM_SECONDS) for result in results]
        speaking = [asyncio.create_task(stream) for stream in streams]
        await asyncio.gather(*(result.begun.wait() for result in results))
        await asyncio.to_thread(meanwhile)
        await asyncio.gather(*speaking)
    return results
