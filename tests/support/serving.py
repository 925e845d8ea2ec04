"""`scripts/serve.py` in a process of its own, as a container runs it, over the demo checkpoint; and streams to it."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import tritonclient.grpc.aio as triton
from tritonclient.grpc import InferInput
from tritonclient.utils import InferenceServerException

from common import stacks
from common.client.requests import Utterance, read_reference
from common.server.rendering import StackOptions, render
from tests.conftest import ROOT

MODEL = stacks.DIT.orchestrator
VOICE = ROOT / "tests" / "assets" / "reference_en.wav"
STREAM_SECONDS = 90.0


@dataclass
class Served:
    """A running serve.py; every port was free."""

    process: subprocess.Popen[str]
    http: int
    grpc: int
    metrics: int
    health: int
    log: Path

    def readiness(self) -> tuple[int, str]:
        """Status and text of the health page."""
        return get(f"http://127.0.0.1:{self.health}/ready")

    def page(self) -> str:
        return get(f"http://127.0.0.1:{self.health}/metrics")[1]

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill_tritonserver(self) -> None:
        """As a machine that goes away: tritonserver at once, with all its connections."""
        command = ["pgrep", "-P", str(self.process.pid), "tritonserver"]
        (victim,) = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        os.kill(int(victim), signal.SIGKILL)
        while not dead(int(victim)):  # a request that comes earlier is one of its own
            time.sleep(0.01)


def dead(process: int) -> bool:
    """Whether it has ended, and its sockets with it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def get(url: str) -> tuple[int, str]:
    """Status and text of a page."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode().strip()


def rendered(models: Path, directory: Path, **settings: str) -> Path:
    """The dit stack over the demo checkpoint, everything in one tritonserver."""
    render(StackOptions(models_dir=models, stack=stacks.DIT.name, device="cpu", settings=settings), directory)
    return directory


@contextmanager
def served(
    repository: Path, log: Path, *options: str, ports: tuple[int, int, int, int] = (0, 0, 0, 0)
) -> Iterator[Served]:
    """serve.py over `repository`, ready; ended when the block is left. `ports`: http, grpc, metrics, health."""
    command = [sys.executable, "-m", "scripts.serve", str(repository), "--log-file", str(log), *options]
    for name, port in zip(("http", "grpc", "metrics", "health"), ports, strict=True):
        command += [f"--{name}-port", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            told = ""
            while "Ctrl-C" not in (line := process.stdout.readline()):
                assert line, f"it ended: {told}{process.stderr.read()}"
                told += line
            found = {name: int(port) for name, port in re.findall(r"(http|grpc|metrics|health) [\d.]+:(\d+)", told)}
            yield Served(process, **found, log=log)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)  # some 6 s where nothing else wants the cores
            except subprocess.TimeoutExpired:
                process.kill()
                raise


@dataclass
class Outcome:
    """How one stream went. `begun` is set once audio has come."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    samples: int = 0
    error: str | None = None


def utterance(text: str) -> Utterance:
    return Utterance(text, read_reference(VOICE), parameters={"seed": 1})


async def speak(connection: triton.InferenceServerClient, text: str, outcome: Outcome) -> Outcome:
    """One stream to its end or its error. Without the header triton_grpc_error, on which tritonserver 2.51 crashes."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        asked = utterance(text)
        yield {"model_name": MODEL, "inputs": asked.tensors(InferInput), "parameters": asked.parameters}

    responses = connection.stream_infer(requests(), stream_timeout=STREAM_SECONDS)
    try:
        async for result, error in responses:
            if error is not None:
                raise error
            outcome.begun.set()
            outcome.samples += result.as_numpy("waveform").size
    except (InferenceServerException, grpc.aio.AioRpcError) as error:
        outcome.error = str(error)
    finally:
        responses.cancel()
    outcome.begun.set()
    return outcome
