"""The speech service as a process beside a tritonserver that this process runs."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from common.server.serving import Companion
from common.server.tritonserver import require_free

STOP_SECONDS = 40.0  # more than it gives its own streams to end

# Ends the service when this process is gone without having said so, as `kill -9` does; its port would stay taken.
_SWEEP = 'read -r _ || kill -s TERM "$1"'


@contextlib.contextmanager
def speech_service(triton: str, voices: Path, host: str, port: int) -> Iterator[threading.Event]:
    """Serve speech over HTTP while the block runs. If the service ends by itself, the event that is yielded is set and
    this process is sent SIGTERM.

    ServerError where the port is taken.
    """
    require_free(port, host)
    command = ("--url", triton, "--ref_audios_dir", str(voices), "--host", host, "--port", str(port))
    service = subprocess.Popen([sys.executable, "-m", "common.speech_service", *command])
    sweeper = subprocess.Popen(
        ["/bin/sh", "-c", _SWEEP, "sweep", str(service.pid)], stdin=subprocess.PIPE, start_new_session=True
    )
    stopping, ended = threading.Event(), threading.Event()

    def watch() -> None:
        service.wait()
        if not stopping.is_set():
            ended.set()
            os.kill(os.getpid(), signal.SIGTERM)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield ended
    finally:
        stopping.set()
        service.terminate()
        watcher.join(STOP_SECONDS)
        service.kill()  # nothing, where it has ended
        service.wait()
        sweeper.communicate(b"\n")


def speech_companion(voices: Path, host: str, port: int) -> Companion:
    """The speech service for `common.server.serving.serve`."""
    return Companion(
        "speech", f"http://{host}:{port}", lambda server: speech_service(server.grpc_url, voices, host, port)
    )
