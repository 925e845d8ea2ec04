"""Our models' metrics, in addition to Triton's own `nv_...`: counted in each model's process, shown on one page.

Each process writes its numbers to a file (`MetricsFile`), and `page` combines the files. Triton's custom metrics
would work too, but each update is a blocking message to tritonserver over the shared memory that the streams use, and
the number that decides whether a server may be stopped should not depend on that.
"""

import bisect
import itertools
import json
import os
import re
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, get_args

from cosyvoice_triton.errors import OverloadedError, UnavailableError

ATTEMPTS = 3  # to read: a reader that is held up between the halves may find both changed
_SPARE = 4096  # bytes that the content may grow by, beside twice its first size
Samples = list[list[Any]]  # of a model instance: name, kind, help, suffix, labels, value of each

ENDING = ".metrics"  # of the file of each model instance

RequestStatus = Literal["ok", "invalid", "refused", "unavailable", "cancelled", "error"]
OUTCOMES: tuple[RequestStatus, ...] = get_args(RequestStatus)


class MetricsFile:
    """The writer of a small file that is replaced several times a second and read by another process, on a disk that
    may be full. An existing one is continued: its process has ended.

    Its bytes are reserved when it is made, and replaced in place from then on: that needs no free block, no inode and
    no name in a directory, so that a full disk does not make a sound model look dead. Its two halves are written in
    turn, each with a checksum before its JSON, which tells the reader what is whole. Not prometheus_client's
    multi-process mode: it maps sparse files into memory, and a write to a page for which the disk has no block ends the
    process with SIGBUS.
    """

    def __init__(self, path: Path, samples: Samples) -> None:
        """Make the file with these samples. OSError if the disk is full already."""
        new = not path.exists()
        source = path.with_suffix(".new") if new else path  # readers see the whole file or none
        if new:
            source.write_bytes(bytes(2 * (2 * len(_content(0, samples)) + _SPARE)))
        self._version = 0 if new else read(path)[0]
        self._file = os.open(source, os.O_RDWR)
        self._half = os.fstat(self._file).st_size // 2
        self.write(samples)
        if new:
            source.rename(path)

    def write(self, samples: Samples) -> None:
        """Replace the samples. ValueError if they have grown beyond what was reserved."""
        version = self._version + 1
        content = _content(version, samples)
        if len(content) > self._half:
            raise ValueError(f"{len(content)} bytes of metrics; {self._half} are reserved")
        os.pwrite(self._file, content.ljust(self._half), version % 2 * self._half)
        self._version = version  # only now: after an error the half that is whole stays

    def close(self) -> None:
        os.close(self._file)


def _content(version: int, samples: Samples) -> bytes:
    content = json.dumps([version, samples]).encode()
    return _checksum(content) + content


def _checksum(content: bytes) -> bytes:
    return b"%08x" % zlib.crc32(content)


def read(path: Path) -> tuple[int, Samples]:
    """Return the latest version's number, which increases with each write, and its samples. OSError if there is no such
    file, ValueError if it is none of these."""
    for _ in range(ATTEMPTS):
        stored = path.read_bytes()
        halves = (half.rstrip() for half in (stored[: len(stored) // 2], stored[len(stored) // 2 :]))
        if whole := [json.loads(half[8:]) for half in halves if half[:8] == _checksum(half[8:])]:
            version, samples = max(whole, key=itemgetter(0))
            return version, samples
    raise ValueError(f"{path} holds no metrics")


@dataclass(frozen=True)
class Metric:
    """A metric family in Prometheus' format, or one sample of it: then with the sample's `suffix` and `labels`.

    The labels of the model and its instance are added when the metric is published.
    """

    name: str
    help: str
    kind: Literal["gauge", "counter", "histogram"] = "counter"
    suffix: str = ""
    labels: tuple[tuple[str, str], ...] = ()

    def sample(self, suffix: str = "", **labels: str) -> "Metric":
        """Return one sample of the family."""
        return Metric(self.name, self.help, self.kind, suffix, tuple(sorted(labels.items())))


# A model's current numbers by sample: a gauge's value, a counter's sum since the start.
Values = Mapping[Metric, float]

LIVE = Metric("tts_requests_live", "Speech requests in progress", "gauge")
ENDED = Metric("tts_requests_total", "Speech requests that have ended, by outcome")
AUDIO = Metric("tts_audio_seconds_total", "Seconds of audio sent")
BAD_ANSWERS = Metric(
    "tts_bad_answers_total",
    "Segments that were found to be no speech of their text, by reason, and whether they were made again or sent",
)
FIRST_CHUNK = Metric(
    "tts_first_chunk_seconds", "Seconds from a request's arrival at the orchestrator to its first audio", "histogram"
)
FIRST_AUDIBLE = Metric(
    "tts_first_audible_seconds",
    "Seconds from a request's arrival at the orchestrator until its audio is heard: leading silence counts",
    "histogram",
)
FIRST_BOUNDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0)

# The metrics of token2wav.
STREAMS = Metric("tts_token2wav_streams_live", "token2wav streams that hold memory", "gauge")
QUEUED = Metric("tts_token2wav_chunks_queued", "Chunks waiting to be rendered, and new streams for a slot", "gauge")
CACHE = Metric("tts_token2wav_cache_bytes", "Bytes of memory held for streams and voices", "gauge")
BATCHES = Metric("tts_token2wav_batches_total", "Batches rendered")
CHUNKS = Metric("tts_token2wav_chunks_total", "Chunks rendered; divided by the batches: the mean batch size")
WAITED = Metric(
    "tts_token2wav_waited_seconds_total", "Seconds that chunks waited from arrival to the start of their batch"
)
RETRIED = Metric("tts_token2wav_chunks_retried_total", "Chunks that were not finite and rendered in float32")
FAILED = Metric("tts_token2wav_chunks_failed_total", "Chunks that could not be rendered and ended their stream")
EVICTED = Metric("tts_token2wav_voices_evicted_total", "Prompt caches of voices that were evicted")
FALLBACKS = Metric(
    "tts_token2wav_precision_fallbacks", "Networks in bfloat16 or float32, because they fail in less", "gauge"
)
LIMIT = Metric("tts_token2wav_streams_limit", "Live streams up to which new listeners are admitted now", "gauge")
LOAD = Metric("tts_token2wav_load", "Listeners over those that admission would take now: 0 to 1", "gauge")
REFUSED = Metric("tts_token2wav_refused_total", "New listeners refused, by the limit that was reached")
OPENED = Metric("tts_token2wav_streams_opened_total", "Streams opened")
OPENED_WAITED = Metric(
    "tts_token2wav_streams_opened_waited_seconds_total", "Seconds from the request of a stream until it was open"
)
GAPS = Metric("tts_token2wav_gaps_total", "Chunks that came after the audio before had been played")
GAP_SECONDS = Metric("tts_token2wav_gap_seconds_total", "Seconds of silence before these chunks")


@dataclass
class LiveRequest:
    """One request to an orchestrator while it is being answered: when it began, seconds to its first chunk and to what
    is heard first, and seconds of audio."""

    begun: float
    first_chunk: float | None = None
    first_audible: float | None = None
    seconds: float = 0.0

    def sent(self, seconds: float, silence: float | None) -> None:
        """Count audio that is being sent to the client. silence: seconds before its first sound; None: all of it."""
        now = time.monotonic() - self.begun
        if self.first_chunk is None:
            self.first_chunk = now
        if self.first_audible is None and silence is not None:
            self.first_audible = max(now, self.first_chunk + self.seconds) + silence
        self.seconds += seconds


class Histogram:
    """Counts seconds by FIRST_BOUNDS."""

    def __init__(self) -> None:
        self._counts = [0] * (len(FIRST_BOUNDS) + 1)  # per bucket, the last one above all bounds
        self._sum = 0.0

    def add(self, seconds: float | None) -> None:
        """Count a request; None: it did not come so far."""
        if seconds is not None:
            self._counts[bisect.bisect_left(FIRST_BOUNDS, seconds)] += 1
            self._sum += seconds

    def values(self, metric: Metric) -> dict[Metric, float]:
        """Return its samples, as those of `metric`."""
        totals = list(itertools.accumulate(self._counts))
        buckets = zip((*FIRST_BOUNDS, "+Inf"), totals, strict=True)
        values: dict[Metric, float] = {metric.sample("_bucket", le=str(bound)): total for bound, total in buckets}
        return values | {metric.sample("_count"): totals[-1], metric.sample("_sum"): self._sum}


class RequestStats:
    """Counts an orchestrator's requests. Safe to read from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live = 0
        self._ended: dict[RequestStatus, int] = dict.fromkeys(OUTCOMES, 0)
        self._audio_seconds = 0.0
        self._first_chunk, self._first_audible = Histogram(), Histogram()

    @contextmanager
    def request(self) -> Iterator[LiveRequest]:
        """Count one request; the exception that leaves the block decides its outcome."""
        with self._lock:
            self._live += 1
        live = LiveRequest(time.monotonic())
        outcome: RequestStatus = "error"
        try:
            yield live
            outcome = "ok"
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            with self._lock:
                self._live -= 1
                self._ended[outcome] += 1
                self._audio_seconds += live.seconds
                self._first_chunk.add(live.first_chunk)
                self._first_audible.add(live.first_audible)

    def values(self) -> Values:
        """Return the current numbers."""
        with self._lock:
            values: dict[Metric, float] = {LIVE: self._live, AUDIO: self._audio_seconds}
            values |= {ENDED.sample(outcome=outcome): count for outcome, count in self._ended.items()}
            return values | self._first_chunk.values(FIRST_CHUNK) | self._first_audible.values(FIRST_AUDIBLE)


def outcome_of(error: BaseException) -> RequestStatus:
    """Return the outcome of a request that raised `error`; see `cosyvoice_triton.errors`."""
    if isinstance(error, ValueError):
        return "invalid"
    if isinstance(error, OverloadedError):
        return "refused"
    if isinstance(error, UnavailableError):
        return "unavailable"
    return "error" if isinstance(error, Exception) else "cancelled"


def samples_of(labels: Mapping[str, str], values: Values) -> Samples:
    """Return the values as samples with these labels, too."""
    return [
        [metric.name, metric.kind, metric.help, metric.suffix, dict(metric.labels) | dict(labels), value]
        for metric, value in values.items()
    ]


def page(directory: Path) -> str:
    """Return the numbers of all model instances in Prometheus' text format."""
    families: dict[str, list[str]] = {}
    for path in sorted(directory.glob(f"*{ENDING}")):
        for name, kind, text, suffix, labels, value in read(path)[1]:
            family = families.setdefault(name, [f"# HELP {name} {text}", f"# TYPE {name} {kind}"])
            pairs = ",".join(f'{key}="{labels[key]}"' for key in sorted(labels))
            family.append(f"{name}{suffix}{{{pairs}}} {value}")
    return "".join(f"{line}\n" for family in families.values() for line in family)


def sum_of(page: str, name: str) -> float:
    """Return the sum of a metric's samples on a metrics page; 0 if there are none."""
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)", page, re.MULTILINE))
