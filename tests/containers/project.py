"""A compose file in the engine of the tests, as a user types it, and requests to its gateway."""

import asyncio
import json
import logging
import shlex
import subprocess
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import httpx2 as httpx
import tritonclient.grpc.aio as triton
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.server.tritonserver import free_port

from tests.conftest import ROOT
from tests.containers.engine import Engine
from tests.containers.images import MADE, provide
from tests.support.programs import compose_command
from tests.support.serve_process import StreamResult, synthesize

NAME = "speech"
VOICE = "kumo"  # of the demo checkpoint
LONG = "This text is spoken while something happens to the servers. " * 6
SECONDS = 600.0  # as long as models may load
PORTS = ("HTTP_PORT", "GRPC_PORT", "SPEECH_PORT", "RUNTIME_PORT", "METRICS_PORT", "HEALTH_PORT", "PROMETHEUS_PORT")
PORTS += ("ALERTMANAGER_PORT",)

log = logging.getLogger("containers")


class Project:
    """Compose with some files and settings. All projects have one name, and so one volume of checkpoints."""

    def __init__(self, engine: Engine, *files: str, **settings: str) -> None:
        self._engine = engine
        self.ports = {name: free_port() for name in PORTS}
        # Only this machine can reach the public ports; the others are published like this anyway.
        public = {name: f"127.0.0.1:{port}" for name, port in self.ports.items() if name in PORTS[:4]}
        self._environment = engine.environment | {name: str(port) for name, port in self.ports.items()} | public
        # These tests are not about speed: streams that this machine cannot render in time are served, too.
        patience = ("token_timeout=60", "model_timeout=60")
        options = " ".join(f"--set {setting}" for setting in ("profile=unlimited", *patience))
        self._environment |= {"TTS_OPTIONS": options} | settings
        command = compose_command()
        assert command is not None
        self._command = [*command, f"--project-name={NAME}", *(f"--file={ROOT / file}" for file in files)]

    def compose(self, *arguments: str, check: bool = True) -> str:
        command, both = [*self._command, *arguments], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        run = subprocess.run(command, cwd=ROOT, env=self._environment, text=True, timeout=SECONDS, **both)
        assert not check or run.returncode == 0, run.stdout[-4000:] + self.logs()
        return run.stdout

    def operate(self, commands: str, **settings: str) -> None:
        """Run commands of docs/operate.md, with other settings from now on."""
        self._environment |= settings
        script = f'dc() {{ {shlex.join(self._command)} "$@"; }}\n{commands}'
        how = {"env": self._environment, "text": True, "timeout": 2 * SECONDS}
        run = subprocess.run(["bash", "-euc", script], capture_output=True, **how)
        assert run.returncode == 0, run.stdout + run.stderr + self.logs()

    def up(self, *services: str) -> None:
        """Started in order, with the images that they need; compose waits for the services that others depend on."""
        provide(self._engine, *(name for name in self.compose("config", "--images", *services).split() if name in MADE))
        self.compose("up", "--detach", "--no-build", "--pull=never", *services)

    def down(self) -> None:
        """The volume with the checkpoints stays."""
        self.compose("--profile=*", "down", "--timeout=20")

    def logs(self) -> str:
        run = [*self._command, "logs", "--no-color", "--tail=8"]
        done = subprocess.run(run, cwd=ROOT, env=self._environment, capture_output=True, text=True)
        return "\n".join(line[:200] for line in done.stdout.splitlines())

    def _identities(self, service: str) -> list[str]:
        labels = f"project={NAME}", f"service={service}"
        filters = [f"--filter=label=com.docker.compose.{label}" for label in labels]
        return self._engine.lines("ps", "--all", "--quiet", *filters)

    def container(self, service: str) -> dict[str, Any]:
        """What `docker inspect` says."""
        (identity,) = self._identities(service)
        return dict(json.loads(self._engine.docker("inspect", identity))[0])

    def exists(self, service: str) -> bool:
        return bool(self._identities(service))

    def healthy(self, service: str) -> bool:
        return bool(self.container(service)["State"]["Health"]["Status"] == "healthy")

    def execute(self, service: str, *command: str, check: bool = True) -> str:
        return self.compose("exec", "--no-TTY", service, *command, check=check)

    def servers(self) -> int:
        """The Triton servers that get requests."""
        counted = self.execute("gateway", "/etc/envoy/run.sh", "servers", check=False).strip()
        return int(counted) if counted.isdigit() else 0

    def get(self, path: str, port: str = "HTTP_PORT") -> tuple[int, bytes]:
        return http("GET", f"http://127.0.0.1:{self.ports[port]}{path}")

    async def speak(self, model: str, text: str, answer: StreamResult) -> StreamResult:
        """One stream through the gateway, in a registered voice."""
        request = Utterance(text, speaker=VOICE, parameters={"seed": 1})
        async with triton.InferenceServerClient(f"127.0.0.1:{self.ports['GRPC_PORT']}") as connection:
            return await synthesize(connection, model, request, answer, SECONDS)

    def spoken(self, model: str, text: str = "Hello there.") -> StreamResult:
        return asyncio.run(self.speak(model, text, StreamResult()))

    def say(self, key: str = "", **fields: str) -> tuple[int, bytes]:
        """A request to the speech API, with the last of its keys if there is no other."""
        key = key or self._environment.get("SPEECH_API_KEYS", "").rpartition(",")[2]
        body = {"input": "Hello there.", "voice": VOICE, "response_format": "wav"} | fields
        url = f"http://127.0.0.1:{self.ports['SPEECH_PORT']}/v1/audio/speech"
        return http("POST", url, json=body, headers={"Authorization": f"Bearer {key}"} if key else {})


def http(method: str, url: str, **sent: Any) -> tuple[int, bytes]:
    """Status and body; 0 and the error if there is no answer."""
    try:
        answer = httpx.request(method, url, timeout=SECONDS, **sent)
    except httpx.TransportError as error:
        return 0, str(error).encode()
    return answer.status_code, answer.content


def moment(container: dict[str, Any], name: str) -> datetime:
    """StartedAt or FinishedAt."""
    return datetime.fromisoformat(container["State"][name][:26].rstrip("Z"))


def wait_for(what: str, condition: Callable[[], object], seconds: float = SECONDS) -> float:
    """The seconds until it was true."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)
    took = time.monotonic() - start
    log.info("%s: %.1f s", what, took)
    return took
