"""Strangers' recordings are decoded in processes of their own, which have little memory and time, and may die alone."""

import atexit
import contextlib
import os
import queue
import resource
import struct
import subprocess
import sys
import threading
from typing import IO

import numpy as np

from cosyvoice_triton.constants import MAX_REFERENCE_SECONDS
from cosyvoice_triton.voice.prompt import Recording
from cosyvoice_triton.voice.recordings import parse_recording

PROCESSES = min(4, os.cpu_count() or 1)
SECONDS = 10.0  # of one recording; two minutes at 192 kHz take two
# Beyond what a process has after its start: the largest upload, and a few times its samples, which are resampled to the
# rate that is carried while they are decoded.
MEMORY_BYTES = 256 << 20
# Bytes that follow, after the seconds that are accepted; and before them the rate of samples, 0: an error.
_REQUEST, _ANSWER = struct.Struct("<dQ"), struct.Struct("<IQ")

_idle: "queue.LifoQueue[_Decoder]" = queue.LifoQueue()
_places = threading.BoundedSemaphore(PROCESSES)


class _Decoder:
    """A process that decodes one recording after another."""

    def __init__(self) -> None:
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | environment,
            start_new_session=True,  # Ctrl-C is for the service, which still answers
        )

    def __call__(self, data: bytes, max_seconds: float) -> Recording:
        """Return the recording in a file; ValueError if it is invalid, OSError or EOFError if the process has died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        watchdog = threading.Timer(SECONDS, self._process.kill)
        watchdog.start()
        try:
            self._process.stdin.write(_REQUEST.pack(max_seconds, len(data)))
            self._process.stdin.write(data)
            self._process.stdin.flush()
            rate, size = _ANSWER.unpack(_exactly(self._process.stdout, _ANSWER.size))
            if size > MEMORY_BYTES:  # it is not what was started
                raise EOFError
            answer = _exactly(self._process.stdout, size)
        finally:
            watchdog.cancel()
        if not rate:
            raise ValueError(answer.decode(errors="replace"))
        return Recording(np.frombuffer(answer, np.float32).copy(), rate=rate)

    def close(self) -> None:
        self._process.kill()
        with contextlib.suppress(OSError):  # what was not sent
            self._process.__exit__(None, None, None)


def decoded(data: bytes, max_seconds: float = MAX_REFERENCE_SECONDS) -> Recording:
    """Return an audio file as a validated recording. ValueError with the reason, also if decoding it takes more than
    MEMORY_BYTES or SECONDS. Not for an event loop."""
    with _places:
        decoder = _decoder()
        try:
            recording = decoder(data, max_seconds)
        except ValueError:
            _idle.put(decoder)
            raise
        except (OSError, EOFError):
            decoder.close()
            raise ValueError(
                f"the recording cannot be decoded with {MEMORY_BYTES >> 20} MiB of memory in {SECONDS:g} s"
            ) from None
        _idle.put(decoder)
        return recording


def warm_up() -> None:
    """Start a process, so that the first recording does not wait for it."""
    _idle.put(_decoder())


def _decoder() -> _Decoder:
    with contextlib.suppress(queue.Empty):
        return _idle.get_nowait()
    return _Decoder()


@atexit.register
def _close_all() -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            _idle.get_nowait().close()


def _exactly(file: IO[bytes], size: int) -> bytes:
    if len(data := file.read(size)) < size:
        raise EOFError
    return data


def _serve() -> None:
    """Decode what comes by the standard input, until its end."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints
    with contextlib.suppress(ValueError):
        import av  # noqa: F401  # now, so that it is not part of the first recording's memory and time
        import soundfile  # noqa: F401

        parse_recording(b"")
    with open("/proc/self/statm", "rb") as sizes:
        used = int(sizes.read().split()[5]) * resource.getpagesize()  # data and stack
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while len(head := requests.read(_REQUEST.size)) == _REQUEST.size:
        max_seconds, size = _REQUEST.unpack(head)
        try:
            recording = parse_recording(requests.read(size), max_seconds=max_seconds)
            rate, answer = recording.rate, np.ascontiguousarray(recording.wav, np.float32).tobytes()
        except ValueError as error:
            rate, answer = 0, str(error).encode(errors="replace")
        answers.write(_ANSWER.pack(rate, len(answer)) + answer)
        answers.flush()


if __name__ == "__main__":
    with contextlib.suppress(MemoryError):
        _serve()
