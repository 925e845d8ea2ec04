"""Results of one request and of a run, with counters of the servers and the speed of this machine.

Times are seconds of one clock; `figures` converts them to ms. Triton's statistics have the queue and compute times of
each model. Models that continue after `execute` has returned (the orchestrators, `tensorrt_llm`, `token2wav*`) have
compute times near zero there; see `RequestOutcome.stages` instead.
"""

import math
import timeit
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from itertools import repeat
from operator import sub
from typing import Any, Literal

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from cosyvoice_triton.audible import PLAYER_SECONDS, Playback
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.errors import is_overloaded

STATISTICS_SECONDS = 10.0
LOOPS = 300_000
RUNS = 7
PERCENTILES = (50, 90, 95, 99)
CANCELLED = "cancelled by the caller"  # the error of a request that its job has cancelled
HUNG = "nothing for "  # how the error of one begins that was silent for too long
TRANSPORT = "transport"  # the rest of the first chunk's latency: network, server front end, queues, client

# A whole answer; its caller left; the error that it should get; the server had as many listeners as it can serve;
# another error; nothing for longer than the load's patience.
Ending = Literal["done", "cancelled", "rejected", "refused", "failed", "hung"]


@dataclass(frozen=True)
class ModelTimes:
    """Sums over the requests of one model, times in seconds. executions: batches; answers from the cache need none."""

    server: str
    name: str
    requests: int = 0
    failures: int = 0
    executions: int = 0
    cache_hits: int = 0
    queue: float = 0.0
    compute_input: float = 0.0
    compute_infer: float = 0.0
    compute_output: float = 0.0


TIMES = ("queue", "compute_input", "compute_infer", "compute_output")


async def model_times(client: triton.InferenceServerClient, server: str) -> list[ModelTimes]:
    """Return the counters of every model; empty if the server does not report any."""
    try:
        answer = await client.get_inference_statistics("", client_timeout=STATISTICS_SECONDS)
    except InferenceServerException:
        return []
    found = []
    for model in answer.model_stats:
        stats = model.inference_stats
        counts = stats.success.count, stats.fail.count, model.execution_count, stats.cache_hit.count
        found.append(ModelTimes(server, model.name, *counts, *(getattr(stats, name).ns / 1e9 for name in TIMES)))
    return found


def between(before: Iterable[ModelTimes], after: Iterable[ModelTimes]) -> list[ModelTimes]:
    """Return the differences of two readings, for models that had requests."""
    known = {(model.server, model.name): astuple(model)[2:] for model in before}
    added = []
    for model in after:
        server, name, *sums = astuple(model)
        added.append(ModelTimes(server, name, *map(sub, sums, known.get((server, name), repeat(0)))))
    return [model for model in added if model.requests or model.failures]


def host_ms() -> float:
    """Return the milliseconds of a fixed loop of arithmetic, calls and dictionary accesses: the fastest of RUNS.

    First chunks depend on how fast the CPU runs Python, in which machines of one kind differ by 1.6 times.
    """
    return 1e3 * min(timeit.repeat(_work, number=1, repeat=RUNS))


def _work() -> None:
    counts: dict[int, int] = {}
    for number in range(LOOPS):
        counts[number & 1023] = counts.get(number & 1023, 0) + number


@dataclass(frozen=True)
class RequestOutcome:
    """How one request ended.

    begun: when it was sent, or was due at a given rate, from the start of the run. arrivals: of each chunk, since
    `begun`; samples: its length. total: time to the end of the answer. error: "" or why it failed; chunks before the
    failure are included. timeline: stages reported by the server, see `AudioPart`. silence: seconds of audio before the
    first audible sample, see `audible`; None if there is none. rejected: whether the error is the one that the request
    should get.
    """

    id: str
    server: str
    begun: float
    arrivals: tuple[float, ...]
    samples: tuple[int, ...]
    total: float
    error: str = ""
    timeline: tuple[tuple[str, float], ...] = ()
    silence: float | None = None
    rejected: bool = False

    @property
    def ending(self) -> Ending:
        """Return how it ended, which the error tells."""
        if self.rejected:
            return "rejected"
        if is_overloaded(self.error):
            return "refused"
        if self.error.startswith(HUNG):
            return "hung"
        if self.error == CANCELLED:
            return "cancelled"
        return "failed" if self.error else "done"

    @property
    def failed(self) -> bool:
        """Return whether it ended with an error that the server should not make."""
        return self.ending in ("failed", "hung")

    @property
    def ended(self) -> float:
        return self.begun + self.total

    @property
    def seconds(self) -> float:
        """Return the length of the audio in seconds."""
        return sum(self.samples) / SAMPLE_RATE

    def played(self, buffer: float = PLAYER_SECONDS) -> tuple[float, float]:
        """Return the longest gap of playback that starts `buffer` seconds after the first audio, and the least audio
        that was left when more arrived: negative in a gap, infinite of a single chunk."""
        playback, gaps, slack = Playback(buffer=buffer), [0.0], [math.inf]
        for arrival, samples in zip(self.arrivals, self.samples, strict=True):
            if (left := playback.left(arrival)) is not None:
                slack.append(left + buffer)
            gaps.append(playback.add(samples / SAMPLE_RATE, arrival))
        return max(gaps), min(slack)

    def audible(self) -> float | None:
        """Return the time to the first audible sample, since `begun`, in a player without a buffer; None if silent."""
        if self.silence is None:
            return None
        playback, before = Playback(buffer=0.0), 0.0
        for arrival, samples in zip(self.arrivals, self.samples, strict=True):
            begins = arrival + max(0.0, playback.left(arrival) or 0.0)
            playback.add(samples / SAMPLE_RATE, arrival)
            if self.silence < before + samples / SAMPLE_RATE:
                return begins + self.silence - before
            before += samples / SAMPLE_RATE
        return None

    def stages(self) -> dict[str, float]:
        """Return the first chunk's latency by stage, in the order they were reached.

        `TRANSPORT` is the latency that is left after the stages. Empty if the server reported none.
        """
        shares: dict[str, float] = {}
        reached = 0.0
        for stage, at in sorted(self.timeline, key=lambda entry: entry[1]):
            shares[stage] = shares.get(stage, 0.0) + at - reached
            reached = at
            if stage == "audio":
                return shares | {TRANSPORT: self.arrivals[0] - reached}
        return {}

    def as_json(self) -> dict[str, Any]:
        gap, slack = self.played()
        return {
            "id": self.id,
            "server": self.server,
            "begun_s": round(self.begun, 6),
            "arrivals_ms": [_ms(arrival) for arrival in self.arrivals],
            "samples": list(self.samples),
            "total_ms": _ms(self.total),
            "audio_seconds": self.seconds,
            "rtf": self.total / self.seconds if self.samples else None,
            "worst_gap_ms": _ms(gap),
            "audible_ms": None if (audible := self.audible()) is None else _ms(audible),
            "least_slack_ms": _ms(slack) if len(self.arrivals) > 1 else None,
            "stages_ms": {stage: _ms(share) for stage, share in self.stages().items()},
            "error": self.error,
        }


@dataclass(frozen=True)
class Run:
    """A whole run, without its warm-up.

    elapsed: from the start of the first request to the end of the last. unsent: requests not made because no server was
    left or the run was interrupted. lost: servers that stopped answering, and how. client_lag: scheduling delay of this
    process, 95th percentile. models: the servers' counters.
    """

    outcomes: Sequence[RequestOutcome]
    elapsed: float
    unsent: int = 0
    lost: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    client_lag: float = 0.0
    models: Sequence[ModelTimes] = ()

    @property
    def good(self) -> list[RequestOutcome]:
        return [outcome for outcome in self.outcomes if not outcome.error]

    @property
    def refused(self) -> list[RequestOutcome]:
        return [outcome for outcome in self.outcomes if outcome.ending == "refused"]

    @property
    def failed(self) -> list[RequestOutcome]:
        return [outcome for outcome in self.outcomes if outcome.failed]

    @property
    def complete(self) -> bool:
        return not self.failed and not self.unsent

    def figures(self) -> dict[str, Any]:
        """Return the figures of the requests that were answered completely, JSON-ready."""
        good = self.good
        audio = sum(outcome.seconds for outcome in good)
        gaps = [outcome.played()[0] for outcome in good]
        unbuffered = [outcome.played(buffer=0.0)[0] for outcome in good]
        audible = [at for outcome in good if (at := outcome.audible()) is not None]
        stages = [outcome.stages() for outcome in good]
        names = list(dict.fromkeys(name for shares in stages for name in shares))
        return {
            "requests": len(self.outcomes),
            "errors": len(self.failed),
            "refused": len(self.refused),
            "refusal_ms": distribution(outcome.total for outcome in self.refused),
            "unsent": self.unsent,
            "peak_in_flight": _peak(self.outcomes),
            "lost_servers": self.lost,
            "processing_seconds": self.elapsed,
            "audio_seconds": audio,
            "rtf": self.elapsed / audio if audio else None,
            "requests_per_second": len(good) / self.elapsed if self.elapsed else None,
            "first_chunk_ms": distribution(outcome.arrivals[0] for outcome in good),
            "audible_ms": distribution(audible),
            "silence_ms": distribution([outcome.silence for outcome in good if outcome.silence is not None]),
            "inaudible": len(good) - len(audible),
            "second_chunk_ms": distribution(o.arrivals[1] - o.arrivals[0] for o in good if len(o.arrivals) > 1),
            "later_chunk_ms": distribution(float(step) for o in good for step in np.diff(o.arrivals)[1:]),
            "total_ms": distribution(outcome.total for outcome in good),
            "request_rtf": distribution((outcome.total / outcome.seconds for outcome in good), unit=1.0),
            "player_buffer_ms": _ms(PLAYER_SECONDS),
            "share_without_gap": _share_without(gaps),
            "unbuffered_share_without_gap": _share_without(unbuffered),
            "unbuffered_worst_gap_ms": _ms(max(unbuffered)) if unbuffered else None,
            "worst_gap_ms": _ms(max(gaps)) if gaps else None,
            "stages_ms": {name: distribution(shares[name] for shares in stages if name in shares) for name in names},
            "client_lag_p95_ms": _ms(self.client_lag),
            "cancelled": sum(outcome.ending == "cancelled" for outcome in self.outcomes),
        }


def distribution(values: Any, unit: float = 1000.0) -> dict[str, float] | None:
    """Return mean, variance, percentiles and maximum of seconds, in milliseconds; None if `values` is empty."""
    scaled = np.fromiter(values, np.float64) * unit
    if not scaled.size:
        return None
    percentiles = np.percentile(scaled, PERCENTILES)
    return {
        "mean": float(scaled.mean()),
        "variance": float(scaled.var()),
        **{f"p{share}": float(value) for share, value in zip(PERCENTILES, percentiles, strict=True)},
        "max": float(scaled.max()),
    }


def _peak(outcomes: Sequence[RequestOutcome]) -> int:
    """Return how many requests were in flight at most; one that ends as another begins is not."""
    changes = [(each.begun, 1) for each in outcomes] + [(each.ended, -1) for each in outcomes]
    return int(max(np.cumsum([change for _, change in sorted(changes)]), default=0))


def _share_without(gaps: Sequence[float]) -> float | None:
    return sum(gap <= 0 for gap in gaps) / len(gaps) if gaps else None


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
