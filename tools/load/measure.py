"""Results of one request and of a run. Times are seconds of one clock; `figures` converts them to ms."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.constants import SAMPLE_RATE
from tools.load.statistics import ModelTimes

PLAYER_BUFFER = 0.25  # seconds between the first audio and the start of playback
PERCENTILES = (50, 90, 95, 99)
TRANSPORT = "transport"  # the rest of the first chunk's latency: network, server front end, queues, client


@dataclass
class Player:
    """Playback that starts `PLAYER_BUFFER` after the first audio."""

    played_until: float | None = None  # None before the first audio
    worst_gap: float = 0.0  # the longest underrun
    least_slack: float = float("inf")  # least audio left when more arrived; negative in a gap

    def add(self, now: float, seconds: float) -> None:
        """`seconds` of audio have arrived."""
        if self.played_until is None:
            self.played_until = now + PLAYER_BUFFER
        else:
            self.least_slack = min(self.least_slack, self.played_until - now)
            self.worst_gap = max(self.worst_gap, now - self.played_until)
        self.played_until = max(self.played_until, now) + seconds


@dataclass(frozen=True)
class RequestOutcome:
    """How one request ended.

    begun: when it was sent, or was due at a given rate, from the start of the run. arrivals: of each chunk, since
    `begun`; samples: its length. total: time to the end of the answer. error: "" or why it failed; chunks before the
    failure are included. timeline: stages reported by the server, see `common.client.requests.timeline_of`.
    """

    id: str
    server: str
    begun: float
    arrivals: tuple[float, ...]
    samples: tuple[int, ...]
    total: float
    error: str = ""
    timeline: tuple[tuple[str, float], ...] = ()

    @property
    def seconds(self) -> float:
        """Length of the audio."""
        return sum(self.samples) / SAMPLE_RATE

    def played(self) -> Player:
        """How playback of this answer went."""
        player = Player()
        for arrival, samples in zip(self.arrivals, self.samples, strict=True):
            player.add(arrival, samples / SAMPLE_RATE)
        return player

    def stages(self) -> dict[str, float]:
        """The first chunk's latency by stage, in the order they were reached.

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
        player = self.played()
        return {
            "id": self.id,
            "server": self.server,
            "begun_s": round(self.begun, 6),
            "arrivals_ms": [_ms(arrival) for arrival in self.arrivals],
            "samples": list(self.samples),
            "total_ms": _ms(self.total),
            "audio_seconds": self.seconds,
            "rtf": self.total / self.seconds if self.samples else None,
            "worst_gap_ms": _ms(player.worst_gap),
            "least_slack_ms": _ms(player.least_slack) if len(self.arrivals) > 1 else None,
            "stages_ms": {stage: _ms(share) for stage, share in self.stages().items()},
            "error": self.error,
        }


@dataclass(frozen=True)
class Run:
    """A whole run, without its warm-up.

    elapsed: from the start of the first request to the end of the last. unsent: requests not made because no server was
    left or the run was interrupted. lost: servers that stopped answering, and how. client_lag: scheduling delay of this
    process, 95th percentile. models, vocoder: counters of the servers, see `statistics`; `vocoder` is token2wav's.
    """

    outcomes: Sequence[RequestOutcome]
    elapsed: float
    unsent: int = 0
    lost: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    client_lag: float = 0.0
    models: Sequence[ModelTimes] = ()
    vocoder: dict[str, float] | None = None

    @property
    def good(self) -> list[RequestOutcome]:
        return [outcome for outcome in self.outcomes if not outcome.error]

    @property
    def failed(self) -> list[RequestOutcome]:
        return [outcome for outcome in self.outcomes if outcome.error]

    @property
    def complete(self) -> bool:
        return not self.failed and not self.unsent

    def figures(self) -> dict[str, Any]:
        """Figures of the requests that were answered completely; JSON-ready."""
        good = self.good
        audio = sum(outcome.seconds for outcome in good)
        gaps = [outcome.played().worst_gap for outcome in good]
        stages = [outcome.stages() for outcome in good]
        names = list(dict.fromkeys(name for shares in stages for name in shares))
        return {
            "requests": len(self.outcomes),
            "errors": len(self.failed),
            "unsent": self.unsent,
            "lost_servers": self.lost,
            "processing_seconds": self.elapsed,
            "audio_seconds": audio,
            "rtf": self.elapsed / audio if audio else None,
            "requests_per_second": len(good) / self.elapsed if self.elapsed else None,
            "first_chunk_ms": distribution(outcome.arrivals[0] for outcome in good),
            "second_chunk_ms": distribution(o.arrivals[1] - o.arrivals[0] for o in good if len(o.arrivals) > 1),
            "later_chunk_ms": distribution(float(step) for o in good for step in np.diff(o.arrivals)[1:]),
            "total_ms": distribution(outcome.total for outcome in good),
            "request_rtf": distribution((outcome.total / outcome.seconds for outcome in good), unit=1.0),
            "player_buffer_ms": _ms(PLAYER_BUFFER),
            "share_without_gap": sum(gap <= 0 for gap in gaps) / len(gaps) if gaps else None,
            "worst_gap_ms": _ms(max(gaps)) if gaps else None,
            "stages_ms": {name: distribution(shares[name] for shares in stages if name in shares) for name in names},
            "vocoder": self.vocoder,
            "client_lag_p95_ms": _ms(self.client_lag),
        }


def distribution(values: Any, unit: float = 1000.0) -> dict[str, float] | None:
    """Mean, variance, percentiles and maximum of seconds, in milliseconds; None if `values` is empty."""
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


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
