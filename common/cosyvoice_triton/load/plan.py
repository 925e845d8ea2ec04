"""The load of a run, and its options."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cosyvoice_triton.arguments import natural_int, positive_int
from cosyvoice_triton.load.jobs import Jobs, LoadJob

REFUSED_PAUSE = 1.0  # seconds until a task whose request was refused sends its next one
MIN_WARMUP = 8  # so that the server has cached the voices of a small manifest, unless --new-voices


@dataclass(frozen=True)
class Load:
    """The requests of a run and the servers that receive them.

    servers: an address each, see `doors`; tasks and requests are distributed over them in turn. tasks: of the closed
    loop, over all servers. rate: requests per second of the open loop, None for the closed loop. listening: a task of
    the closed loop waits until its audio has been played before the next request. warmup: jobs that run first and are
    not counted. seconds: for which the closed loop sends requests. timeout: of a whole answer; patience: without any
    part of it. persistent: a server that ends comes back; a task sends nothing for `pause` seconds after an error then,
    otherwise only after a refusal. audio_dir: where the audio is written, None to drop it. metrics: host:port of the
    servers' metrics pages.
    """

    servers: Sequence[str]
    model: str
    mode: Literal["streaming", "offline"]
    jobs: Sequence[LoadJob]
    warmup: Sequence[LoadJob] = ()
    tasks: int = 1
    rate: float | None = None
    listening: bool = False
    seconds: float = float("inf")
    timeout: float = 120.0
    patience: float | None = None
    persistent: bool = False
    pause: float = REFUSED_PAUSE
    audio_dir: Path | None = None
    metrics: Sequence[str] = ()

    @classmethod
    def from_arguments(
        cls,
        args: argparse.Namespace,
        servers: Sequence[str],
        jobs: Jobs,
        count: int,
        tasks: int,
        rate: float | None,
        audio_dir: Path | None,
        listening: bool = False,
    ) -> "Load":
        """Builds a load of `count` jobs after the warm-up; the other settings are those of `add_load_arguments`."""
        warmup = args.warmup_requests
        if warmup is None:
            warmup = max(tasks, min(len(jobs), MIN_WARMUP))
        return cls(
            servers=servers,
            model=args.model_name,
            mode=args.mode,
            jobs=jobs.take(count),
            warmup=jobs.take(warmup),
            tasks=tasks,
            rate=rate,
            listening=listening,
            timeout=args.timeout,
            audio_dir=audio_dir,
            metrics=args.metrics,
        )

    def settings(self) -> dict[str, Any]:
        """Return the settings, JSON-ready."""
        return {
            "servers": list(self.servers),
            "model": self.model,
            "mode": self.mode,
            "num_tasks": None if self.rate is not None else self.tasks,
            "request_rate": self.rate,
            "listening": self.listening,
            "warmup_requests": len(self.warmup),
            "timeout_seconds": self.timeout,
        }

    def shape(self) -> str:
        """Describes the load in a few words."""
        if self.rate is not None:
            return f"{self.rate:g} requests per second"
        return f"{self.tasks} listeners" if self.listening else f"{self.tasks} at once"


def add_load_arguments(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """Adds the options of a measurement and returns their group; the caller adds the concurrency or rate."""
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--warmup-requests",
        type=natural_int,
        help=f"sent first and not counted (default: one per task, at least {MIN_WARMUP} of different rows)",
    )
    group.add_argument(
        "--log-interval", type=positive_int, default=5, help="requests between two updates of the percentiles"
    )
    group.add_argument(
        "--metrics",
        nargs="+",
        default=[],
        metavar="HOST:PORT",
        help="metrics pages of our models, such as localhost:8003: adds token2wav's mean wait and batch size",
    )
    return group
