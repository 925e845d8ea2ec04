"""Strangers' recordings, decoded and validated before they are sent to a model or registered as a voice: in processes
of their own, which have little memory and time, and may die alone."""

import atexit
import base64
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
from cosyvoice_triton.voice.prompt import Recording, validate_reference
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


def decode(data: bytes, max_bytes: int, max_seconds: float = MAX_REFERENCE_SECONDS) -> Recording:
    """Return an audio file as a recording, channels averaged. ValueError with the reason if it is invalid."""
    if len(data) > max_bytes:
        raise ValueError(f"the recording has {len(data)} bytes, more than the limit of {max_bytes}")
    return decode_apart(data, max_seconds)


def decode_base64(text: str, max_bytes: int, max_seconds: float = MAX_REFERENCE_SECONDS) -> Recording:
    """Decode a file in base64, plain or as a data URL. ValueError, also for other URLs: none is fetched."""
    if not text.isascii():
        raise ValueError("ref_audio is not base64: it has characters beyond ASCII")
    if text[:5].lower() == "data:":
        text = text.partition(",")[2]
    elif "://" in text[:16]:
        raise ValueError("ref_audio is a URL, and URLs are not fetched: send the file itself in base64")
    # Lines, the alphabet for URLs and missing padding are variants of base64 (RFC 4648), which many encoders write.
    text = text.strip().translate({ord("-"): "+", ord("_"): "/", **dict.fromkeys(map(ord, "\r\n\t"))}).rstrip("=")
    text += "=" * (-len(text) % 4)
    if len(text) > max_bytes * 4 // 3 + 4:
        raise ValueError(f"ref_audio is longer than {max_bytes} bytes in base64")
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"ref_audio is not base64: {error}") from None
    return decode(data, max_bytes, max_seconds)


def from_pcm16(data: bytes, max_bytes: int) -> Recording:
    """Return 16-bit samples at 16 kHz, which the plain runtime's gRPC clients send. ValueError."""
    if len(data) > max_bytes or len(data) % 2:
        raise ValueError(f"prompt_audio has {len(data)} bytes: expected whole 16-bit samples, up to {max_bytes} bytes")
    samples = np.frombuffer(data, "<i2").astype(np.float32) / (1 << 15)
    return Recording(validate_reference(samples, name="prompt_audio"))


def decode_apart(data: bytes, max_seconds: float = MAX_REFERENCE_SECONDS) -> Recording:
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
