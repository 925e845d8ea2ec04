"""The speech service as a child process of the process that runs a tritonserver."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from cosyvoice_triton.server.tritonserver import uninterrupted

STOP_SECONDS = 40.0  # longer than the service waits for its own streams (command.DRAIN_SECONDS)

# Ends the service if this process dies without stopping it, as with `kill -9`; otherwise its port would stay in use.
_REAPER = 'read -r _ || kill -s TERM "$1"'


@contextlib.contextmanager
def speech_service(triton: str, voices: Path, host: str, port: int) -> Iterator[threading.Event]:
    """Serve speech over HTTP while a block runs: `with speech_service(...) as ended:`. If the service ends
    unexpectedly, `ended` is set and this process gets SIGTERM."""
    command = ("--url", triton, "--ref_audios_dir", str(voices), "--host", host, "--port", str(port))
    # More than any plan of a GPU (profiles.py): the server beside it refuses what it cannot serve.
    environment = {"SPEECH_MAX_STREAMS": "256"} | os.environ
    program = [sys.executable, "-m", "cosyvoice_triton", "speech"]
    service = subprocess.Popen([*program, *command], env=environment)
    reaper = subprocess.Popen(
        ["/bin/sh", "-c", _REAPER, "reaper", str(service.pid)], stdin=subprocess.PIPE, start_new_session=True
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
        try:
            service.terminate()
            watcher.join(STOP_SECONDS)
        finally:  # also if a second signal ends the wait
            with uninterrupted():
                service.kill()  # no effect if it has ended
                service.wait()
                reaper.communicate(b"\n")
