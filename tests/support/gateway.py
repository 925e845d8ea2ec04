"""nginx with deploy/nginx/balance.sh, as the gateway's container runs them."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cosyvoice_triton.server.tritonserver import free_port

from tests.conftest import ROOT
from tests.support.serve_process import get


@dataclass
class Gateway:
    """nginx with the script that updates its list of servers, and its ports."""

    http: int
    grpc: int
    run: Path

    def servers(self) -> int:
        """The number of servers in its list."""
        return (self.run / "servers").read_text().count("tts ")


@contextmanager
def gateway(
    directory: Path, servers: list[str], stop: signal.Signals = signal.SIGTERM, **environment: str
) -> Iterator[Gateway]:
    """deploy/nginx with other ports and paths. `stop` must end it, with code 0."""
    run, ports = directory / "run", {number: free_port() for number in (8000, 8001, 10086)}
    config = (ROOT / "deploy/nginx/nginx.conf").read_text()
    for number, port in ports.items():
        assert f"listen {number}" in config
        config = config.replace(f"listen {number}", f"listen 127.0.0.1:{port}")
    config = config.replace("/tmp/nginx", str(run)).replace("/etc/nginx/gateway.d", str(directory))
    if os.geteuid() == 0:  # otherwise workers run as the user "nobody", who cannot read pytest's directories
        config = f"user root;\n{config}"
    (directory / "nginx.conf").write_text(config)
    settings = {"TTS_SERVERS": " ".join(servers), "SPEECH_SERVERS": f"127.0.0.1:{free_port()}"}
    settings |= {"NGINX_CONF": str(directory / "nginx.conf"), "RUN_DIR": str(run)}
    # A shell cannot trap signals that were ignored when it started, as by a script's background job.
    command = ["env", "--default-signal=INT,QUIT", "sh", ROOT / "deploy/nginx/balance.sh"]
    with (
        (directory / "log").open("wb") as log,
        subprocess.Popen(command, env=os.environ | settings | environment, stdout=log, stderr=log) as process,
    ):
        try:
            wait_for(lambda: answers(f"http://127.0.0.1:{ports[8000]}/gateway/health"))
            yield Gateway(ports[8000], ports[8001], run)
            assert process.poll() is None, (directory / "log").read_text()
        finally:
            process.send_signal(stop)
            try:
                assert process.wait(60) == 0
            finally:
                process.kill()


def answers(url: str) -> bool:
    try:
        return get(url)[0] == 200
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
