"""What our models tell on Triton's metrics page, beside Triton's own `nv_...`.

A model counts in its own process, in plain numbers; `triton_io.Published` carries them to the page.
"""

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from common.constants import SAMPLE_RATE
from common.errors import UnavailableError

Outcome = Literal["ok", "invalid", "unavailable", "cancelled", "error"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "invalid", "unavailable", "cancelled", "error")

# What a model has counted, by metric: a gauge's value, a counter's sum since the start, or what a histogram is to be
# told anew. A metric of several labels has a key for each.
Values = Mapping["Metric", float | Sequence[float]]


@dataclass(frozen=True)
class Metric:
    """One line of the page (a histogram: one family of lines). `labels` beside the model's and its instance's."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    buckets: tuple[float, ...] = ()

    def of(self, **labels: str) -> "Metric":
        """The same metric under further labels."""
        return Metric(self.name, self.kind, self.help, tuple(sorted(labels.items())), self.buckets)


LIVE = Metric("tts_requests_live", "gauge", "Requests to speak that have begun and not ended")
ENDED = Metric("tts_requests_total", "counter", "Requests to speak that have ended, by outcome")
AUDIO = Metric("tts_audio_seconds_total", "counter", "Audio sent, seconds")
FIRST_CHUNK = Metric(
    "tts_first_chunk_seconds",
    "histogram",
    "From a request's arrival at its model to its first audio, seconds",
    buckets=(0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0),
)

STREAMS = Metric("tts_vocoder_streams_live", "gauge", "Streams that the vocoder holds memory for")
QUEUED = Metric("tts_vocoder_chunks_queued", "gauge", "Chunks that wait to be rendered")
CACHE = Metric("tts_vocoder_cache_bytes", "gauge", "Memory of live streams and of voices, bytes")
BATCHES = Metric("tts_vocoder_batches_total", "counter", "Batches rendered")
CHUNKS = Metric("tts_vocoder_chunks_total", "counter", "Chunks rendered; by the batches: the mean batch")
WAITED = Metric("tts_vocoder_waited_seconds_total", "counter", "Chunks' time from arrival to the start of their batch")
CONTEXTS = Metric("tts_vocoder_contexts", "gauge", "Execution contexts of the flow's TensorRT plans")
CONTEXT_WAITED = Metric("tts_vocoder_context_waited_seconds_total", "counter", "Waiting for one of them, seconds")


class Speaking:
    """One request to an orchestrator while it is answered."""

    def __init__(self, now: float) -> None:
        self._begun = now
        self.first_chunk: float | None = None
        self.seconds = 0.0

    def sent(self, samples: int) -> None:
        """Note audio on its way to the client."""
        if self.first_chunk is None:
            self.first_chunk = time.monotonic() - self._begun
        self.seconds += samples / SAMPLE_RATE


class RequestStats:
    """Counts an orchestrator's requests; may be read from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live = 0
        self._ended: dict[Outcome, int] = dict.fromkeys(OUTCOMES, 0)
        self._audio_seconds = 0.0
        self._first_chunks: list[float] = []

    @contextmanager
    def request(self) -> Iterator[Speaking]:
        """Count one request, and by the exception that leaves the block how it ended."""
        with self._lock:
            self._live += 1
        speaking = Speaking(time.monotonic())
        outcome: Outcome = "error"
        try:
            yield speaking
            outcome = "ok"
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            with self._lock:
                self._live -= 1
                self._ended[outcome] += 1
                self._audio_seconds += speaking.seconds
                if speaking.first_chunk is not None:
                    self._first_chunks.append(speaking.first_chunk)

    def take(self) -> Values:
        """The numbers now; a first chunk's latency is in one answer only."""
        with self._lock:
            first_chunks, self._first_chunks = self._first_chunks, []
            ended = {ENDED.of(outcome=outcome): float(count) for outcome, count in self._ended.items()}
            return {LIVE: self._live, AUDIO: self._audio_seconds, FIRST_CHUNK: first_chunks, **ended}


def outcome_of(error: BaseException) -> Outcome:
    """How a request ended that raised `error`; see `errors`."""
    if isinstance(error, ValueError):
        return "invalid"
    if isinstance(error, UnavailableError):
        return "unavailable"
    return "error" if isinstance(error, Exception) else "cancelled"


def sum_of(page: str, name: str) -> float:
    """The sum of a metric's lines on a metrics page; 0 when there are none."""
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)", page, re.MULTILINE))
