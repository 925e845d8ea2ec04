"""What our models tell of themselves, beside Triton's own `nv_...`: counted in each model's process, one page for all.

Each process writes its numbers to a file, and `page` makes a page of the files. Triton's custom metrics would do, too;
but each of their updates is a message to tritonserver that waits for its answer, over the same shared memory as the
streams, and what says whether a server may be ended should not depend on that.
"""

import bisect
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.constants import SAMPLE_RATE
from common.errors import UnavailableError

logger = logging.getLogger(__name__)

VARIABLE = "TTS_METRICS_DIR"  # where the process that runs tritonserver wants the files
PERIOD_SECONDS = 0.25

Outcome = Literal["ok", "invalid", "unavailable", "cancelled", "error"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "invalid", "unavailable", "cancelled", "error")


@dataclass(frozen=True)
class Metric:
    """A family of lines of the page. `suffix` and `labels` tell its lines apart, beside the model's instance."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    suffix: str = ""
    labels: tuple[tuple[str, str], ...] = ()

    def line(self, suffix: str = "", **labels: str) -> "Metric":
        """One line of the family."""
        return Metric(self.name, self.kind, self.help, suffix, tuple(sorted(labels.items())))


# A model's numbers, line by line: a gauge's value, a counter's sum since the start.
Values = Mapping[Metric, float]

LIVE = Metric("tts_requests_live", "gauge", "Requests to speak that have begun and not ended")
ENDED = Metric("tts_requests_total", "counter", "Requests to speak that have ended, by outcome")
AUDIO = Metric("tts_audio_seconds_total", "counter", "Audio sent, seconds")
FIRST_CHUNK = Metric(
    "tts_first_chunk_seconds",
    "histogram",
    "From a request's arrival at its model to its first audio, seconds",
)
FIRST_CHUNK_BOUNDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0)

# The metrics of token2wav. Their prefix stays, because dashboards use it; elsewhere "vocoder" means HiFT alone.
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
        self._first_chunks = [0] * (len(FIRST_CHUNK_BOUNDS) + 1)  # up to each bound, and beyond the last
        self._first_chunk_seconds = 0.0

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
                    self._first_chunks[bisect.bisect_left(FIRST_CHUNK_BOUNDS, speaking.first_chunk)] += 1
                    self._first_chunk_seconds += speaking.first_chunk

    def values(self) -> Values:
        """The numbers now."""
        with self._lock:
            values: dict[Metric, float] = {LIVE: self._live, AUDIO: self._audio_seconds}
            values |= {ENDED.line(outcome=outcome): count for outcome, count in self._ended.items()}
            total = 0
            for bound, count in zip((*FIRST_CHUNK_BOUNDS, "+Inf"), self._first_chunks, strict=True):
                total += count
                values[FIRST_CHUNK.line("_bucket", le=str(bound))] = total
            values |= {FIRST_CHUNK.line("_count"): total, FIRST_CHUNK.line("_sum"): self._first_chunk_seconds}
            return values


def outcome_of(error: BaseException) -> Outcome:
    """How a request ended that raised `error`; see `errors`."""
    if isinstance(error, ValueError):
        return "invalid"
    if isinstance(error, UnavailableError):
        return "unavailable"
    return "error" if isinstance(error, Exception) else "cancelled"


class Published:
    """Brings what `read` returns to the file of a model's instance, every PERIOD_SECONDS, from a thread of its own.

    Where the environment names no directory there is nothing to do.
    """

    def __init__(self, read: Callable[[], Values], args: Mapping[str, str]) -> None:
        """`args`: Triton's own, of `initialize`; they name the model and its instance."""
        self._read = read
        self._labels = {"model": args["model_name"], "model_instance": args["model_instance_name"]}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if directory := os.environ.get(VARIABLE):
            self._path = Path(directory) / f"{args['model_instance_name']}.json"
            self._write()  # so that every line is there before the first request
            self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_SECONDS):
            try:
                self._write()
            except Exception:  # figures are no reason to end a model
                logger.exception("the metrics could not be written")

    def _write(self) -> None:
        lines = [
            [one.name, one.kind, one.help, one.suffix, dict(one.labels) | self._labels, value]
            for one, value in self._read().items()
        ]
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(lines))
        fresh.rename(self._path)  # whoever reads sees the earlier numbers or these


def page(directory: Path) -> str:
    """The numbers of all models' instances in Prometheus' format."""
    families: dict[str, list[str]] = {}
    for path in sorted(directory.glob("*.json")):
        for name, kind, text, suffix, labels, value in json.loads(path.read_text()):
            family = families.setdefault(name, [f"# HELP {name} {text}", f"# TYPE {name} {kind}"])
            told = ",".join(f'{key}="{labels[key]}"' for key in sorted(labels))
            family.append(f"{name}{suffix}{{{told}}} {value}")
    return "".join(f"{line}\n" for family in families.values() for line in family)


def sum_of(page: str, name: str) -> float:
    """The sum of a metric's lines on a metrics page; 0 when there are none."""
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)", page, re.MULTILINE))
