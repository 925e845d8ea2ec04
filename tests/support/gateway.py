"""Envoy with deploy/envoy, as the gateway's container runs it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from cosyvoice_triton.server.readiness import fault
from cosyvoice_triton.server.tritonserver import free_port

from tests.conftest import ROOT
from tests.support.serve_process import get
from tests.support.waiting import until

FOLDER = ROOT / "deploy/envoy"
ENVOY = Path(sys.executable).parent / "envoy"


class Ports(NamedTuple):
    """Of a Triton server."""

    http: int
    grpc: int
    health: int


@dataclass
class Gateway:
    """The gateway's ports, and the process that a container would have as its first."""

    http: int
    grpc: int
    speech: int
    admin: int
    metrics: int
    log: Path
    process: "subprocess.Popen[bytes]"

    def servers(self, cluster: str = "tts_grpc") -> int:
        """Return how many servers get requests."""
        name = f"cluster.{cluster}.membership_healthy"
        return int(get(f"http://127.0.0.1:{self.admin}/stats?filter=^{name}$")[1].removeprefix(f"{name}: "))

    def accesses(self) -> list[dict[str, Any]]:
        """Return the lines of its access log, which Envoy writes within a second."""
        complete = self.log.read_text().split("\n")[:-1]
        return [json.loads(line) for line in complete if line.startswith("{")]


@contextmanager
def gateway(
    directory: Path, servers: Sequence[Ports], speech: Sequence[int] = (), edit: Callable[[str], str] = str
) -> Iterator[Gateway]:
    """Runs it with other ports and servers. SIGTERM must end it, with code 0. edit: of the file's text."""
    listen = {number: free_port() for number in (8000, 8001, 10086, 9901, 9902)}
    config = yaml.safe_load(edit((FOLDER / "envoy.yaml").read_text()))
    at(config["admin"], listen[9901])
    for listener in config["static_resources"]["listeners"]:
        at(listener, listen[listener["address"]["socket_address"]["port_value"]])
    ports: dict[str, list[tuple[int, int]]] = {
        "tts_grpc": [(one.grpc, one.health) for one in servers],
        "tts_http": [(one.http, one.health) for one in servers],
        "speech": [(port, port) for port in speech],
        "admin": [(listen[9901], listen[9901])],
    }
    for cluster in config["static_resources"]["clusters"]:
        if cluster["name"] in ports:
            cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
                {"endpoint": at({"health_check_config": {"port_value": health}}, port)}
                for port, health in ports[cluster["name"]]
            ]
    path, log = directory / "envoy.yaml", directory / "log"
    path.write_text(yaml.safe_dump(config))
    environment = os.environ | {"PATH": f"{ENVOY.parent}:{os.environ['PATH']}"}
    # A shell cannot trap signals that were ignored when it started, as by a script's background job.
    command = ["env", "--default-signal=INT", str(FOLDER / "run.sh"), str(path), str(listen[9901])]
    with log.open("wb") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process:
        running = Gateway(listen[8000], listen[8001], listen[10086], listen[9901], listen[9902], log, process)
        try:
            wait_for(lambda: process.poll() is not None or not fault(f"http://127.0.0.1:{running.http}/gateway/health"))
            assert process.poll() is None, log.read_text()
            yield running
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                assert process.wait(60) == 0, log.read_text()
            finally:
                process.kill()


def at(place: dict[str, Any], port: int) -> dict[str, Any]:
    """Return `place` with an address of this machine."""
    place["address"] = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    return place


wait_for = partial(until, every=0.1)
