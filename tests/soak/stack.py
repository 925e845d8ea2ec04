"""The servers under a supervisor: tritonserver with two stacks, the speech service, Envoy, on the demo checkpoint.

One tritonserver serves the dit stack streamed and the unet stack offline; they share the LLM and the prompt models. The
speech service runs in a process of its own, as compose and Kubernetes run it, with the plain runtime's gRPC service.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from cosyvoice_triton.load.doors import Door
from cosyvoice_triton.monitoring.environment import TEST_FAULTS
from cosyvoice_triton.server.options import StackOptions
from cosyvoice_triton.server.readiness import fault
from cosyvoice_triton.server.rendering import render
from cosyvoice_triton.server.tritonserver import free_port

from tests.soak.routes import STREAMED, WHOLE, doors
from tests.support.gateway import Ports, gateway

READY_SECONDS, POLL_SECONDS = 180.0, 0.5
RESTART_SECONDS = 1.0  # between the end of a process and its successor
STOP_SECONDS = 90.0
LOCAL = "127.0.0.1"

# A dead proxy, as Docker may put one into the environment.
PROXIES = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")}


@dataclass
class Life:
    """One process of a service, from start to end; times are of the run's clock. code: None while it runs."""

    service: str
    begun: float
    pid: int
    ready: float | None = None
    ended: float | None = None
    code: int | None = None
    last_words: str = ""
    fault: str = ""  # that ended it; empty: it ended by itself, or the run did


@dataclass
class SupervisedService:
    """A process that is started again whenever it ends. page: answers 200 when it is ready."""

    name: str
    command: Sequence[str]
    page: str
    log: Path
    environment: Mapping[str, str]
    lives: list[Life] = field(default_factory=list)
    expected_end: str = ""  # the fault that is about to end it, until a successor is ready
    stopping: bool = False
    process: subprocess.Popen[bytes] | None = None

    async def run(self, clock: Callable[[], float]) -> None:
        """Start it, and start it again when it ends, until `stop`."""
        while not self.stopping:
            life = self._start(clock())
            assert self.process is not None
            while (code := self.process.poll()) is None:
                if life.ready is None and not await asyncio.to_thread(fault, self.page):
                    life.ready, self.expected_end = clock(), ""
                await asyncio.sleep(POLL_SECONDS)
            if self.stopping:
                return
            life.ended, life.code, life.last_words = clock(), code, self._last_words()
            life.fault = self.expected_end
            await asyncio.sleep(RESTART_SECONDS)

    def _start(self, now: float) -> Life:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | dict(self.environment),
                start_new_session=True,  # Ctrl-C ends the load first
            )
        self.lives.append(Life(self.name, now, self.process.pid))
        return self.lives[-1]

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), "")

    @property
    def ready(self) -> bool:
        """Whether the present process has become ready; it may hang since."""
        return bool(self.lives) and self.lives[-1].ready is not None and self.lives[-1].ended is None

    @property
    def code(self) -> int | None:
        """The exit code of the last process."""
        return None if self.process is None else self.process.returncode

    async def stop(self) -> None:
        """End it with SIGTERM, and with SIGKILL if it does not obey."""
        self.stopping = True
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            await asyncio.to_thread(self.process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)


@dataclass(frozen=True)
class LocalStack:
    """The running services by name, `serve` and `speech`, and the doors to them by route. faults: the directory of
    TTS_TEST_FAULTS."""

    services: Mapping[str, SupervisedService]
    speech: str  # URL
    faults: Path
    doors: Mapping[str, Door] = field(default_factory=dict)

    def roots(self) -> dict[str, int]:
        """Process ids of the services that run, by name."""
        return {name: each.process.pid for name, each in self.services.items() if each.process is not None}

    async def wait_ready(self) -> None:
        """RuntimeError if it is not ready in time."""
        deadline, services = time.monotonic() + READY_SECONDS, self.services.values()
        while not all([service.ready and not await asyncio.to_thread(fault, service.page) for service in services]):
            if time.monotonic() > deadline:
                late = ", ".join(f"{service.name}: {service.log}" for service in services)
                raise RuntimeError(f"the stack was not ready within {READY_SECONDS:.0f} s; see {late}")
            await asyncio.sleep(POLL_SECONDS)


def rendered(models: Path, directory: Path) -> Path:
    """The model repository of both stacks."""
    for stack, decoupled in ((STREAMED, True), (WHOLE, False)):
        settings = {"profile": "unlimited"}  # a CPU is soon full, and a refused request shows less than a served one
        options = StackOptions(
            models_dir=models, stack=stack.name, decoupled=decoupled, device="cpu", settings=settings
        )
        render(options, directory / stack.name)
    for model in WHOLE.models:
        shutil.copytree(directory / WHOLE.name / model, directory / STREAMED.name / model)
    return directory / STREAMED.name


@asynccontextmanager
async def local_stack(models: Path, work: Path, clock: Callable[[], float]) -> AsyncIterator[LocalStack]:
    """A stack that is ready. models: a demo checkpoint. work: for the repository, logs and voices."""
    repository = rendered(models, work / "repository")
    voices, faults = work / "voices", work / "faults"
    shutil.copytree(models / "voices", voices)
    faults.mkdir()
    http, grpc, metrics, health, speech, runtime = (free_port() for _ in range(6))
    serve = [str(repository), "--log-file", str(work / "tritonserver.log"), "--http-port", str(http)]
    serve += ["--grpc-port", str(grpc), "--metrics-port", str(metrics), "--health-port", str(health)]
    speak = ["--url", f"{LOCAL}:{grpc}", "--ref_audios_dir", str(voices)]
    speak += ["--port", str(speech), "--runtime_port", str(runtime)]
    speak += ["--allowed_hosts", "localhost", "speech"]  # the host of Envoy's probes

    def service(name: str, command: str, arguments: list[str], page: str, **environment: str) -> SupervisedService:
        launched = [sys.executable, "-m", "cosyvoice_triton", command, *arguments]
        return SupervisedService(name, launched, page, work / f"{name}.log", PROXIES | environment)

    services = [
        service("serve", "serve", serve, f"http://{LOCAL}:{health}/ready", **{TEST_FAULTS: str(faults)}),
        service("speech", "speech", speak, f"http://{LOCAL}:{speech}/health"),
    ]
    stack = LocalStack({each.name: each for each in services}, f"http://{LOCAL}:{speech}", faults)
    running = [asyncio.create_task(each.run(clock)) for each in services]
    try:
        await stack.wait_ready()
        folder = work / "gateway"
        folder.mkdir()
        with gateway(folder, [Ports(http, grpc, health)], [speech]) as envoy:
            addresses = f"{LOCAL}:{grpc}", stack.speech, f"{LOCAL}:{runtime}", f"http://{LOCAL}:{envoy.speech}"
            yield replace(stack, doors=doors(*addresses))
    finally:
        await asyncio.gather(*(each.stop() for each in services))
        await asyncio.gather(*running, return_exceptions=True)
