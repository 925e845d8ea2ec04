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
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np

from cosyvoice_triton.constants import MAX_REFERENCE_SECONDS
from cosyvoice_triton.voice.prompt import Recording, validate_reference
from cosyvoice_triton.voice.recordings import parse_recording

PROCESSES = min(4, os.cpu_count() or 1)
SECONDS = 10.0  # of one recording; two minutes at 192 kHz take two
# Beyond what a process has after its start: the largest upload, and a few times its samples, which are resampled to the
# rate that is carried while they are decoded.
MEMORY_BYTES = 256 << 20
# Before a file: the seconds that are accepted; before an answer: the rate of its samples, 0: an error.
_REQUEST, _ANSWER = struct.Struct("<d"), struct.Struct("<I")

_idle: "queue.LifoQueue[_Decoder | None]" = queue.LifoQueue()  # None: a place for one that is not started yet
for _ in range(PROCESSES):
    _idle.put(None)


class _Decoder:
    """A process that decodes one recording after another."""

    def __init__(self) -> None:
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
        self._pipe, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | environment,
            start_new_session=True,  # Ctrl-C is for the service, which still answers
        )
        theirs.close()

    def __call__(self, data: bytes, max_seconds: float) -> Recording:
        """Return the recording in a file; ValueError if it is invalid, OSError or EOFError if the process has died."""
        watchdog = threading.Timer(SECONDS, self._process.kill)
        watchdog.start()
        try:
            self._pipe.send_bytes(_REQUEST.pack(max_seconds) + data)
            answer = self._pipe.recv_bytes(MEMORY_BYTES)  # of more, it is not what was started
        finally:
            watchdog.cancel()
        (rate,) = _ANSWER.unpack_from(answer)
        if not rate:
            raise ValueError(answer[_ANSWER.size :].decode(errors="replace"))
        return Recording(np.frombuffer(answer, np.float32, offset=_ANSWER.size).copy(), rate=rate)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()


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
    decoder = _idle.get()
    try:
        decoder = decoder or _Decoder()  # an OSError here is not the caller's fault
        try:
            return decoder(data, max_seconds)
        except (OSError, EOFError):
            decoder.close()
            decoder = None
            raise ValueError(
                f"the recording cannot be decoded with {MEMORY_BYTES >> 20} MiB of memory in {SECONDS:g} s"
            ) from None
    finally:
        _idle.put(decoder)


def warm_up() -> None:
    """Start a process, so that the first recording does not wait for it."""
    _idle.put(_idle.get() or _Decoder())


@atexit.register
def _close_all() -> None:
    for decoder in filter(None, _idle.queue):
        decoder.close()


def _serve(pipe: Connection) -> None:
    """Decode what comes, until the service closes its end."""
    with contextlib.suppress(ValueError):
        import av  # noqa: F401  # now, so that it is not part of the first recording's memory and time
        import soundfile  # noqa: F401

        parse_recording(b"")
    with open("/proc/self/statm", "rb") as sizes:
        used = int(sizes.read().split()[5]) * resource.getpagesize()  # data and stack
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        request = pipe.recv_bytes()
        (max_seconds,) = _REQUEST.unpack_from(request)
        try:
            recording = parse_recording(request[_REQUEST.size :], max_seconds=max_seconds)
            rate, answer = recording.rate, np.ascontiguousarray(recording.wav, np.float32).tobytes()
        except ValueError as error:
            rate, answer = 0, str(error).encode(errors="replace")
        pipe.send_bytes(_ANSWER.pack(rate) + answer)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, MemoryError):
        _serve(Connection(int(sys.argv[1])))
