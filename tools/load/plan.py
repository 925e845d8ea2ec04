"""What a run asks of whom, and the options that say so."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.client.requests import ClientError
from tools.arguments import natural_int, positive_int
from tools.load.jobs import Job, Jobs

MIN_WARMUP = 8  # so that the voices of a small manifest are known to the server, unless --new-voices


@dataclass(frozen=True)
class Load:
    """What to ask of whom.

    servers: host:port each; tasks and requests are dealt out to them in turn. tasks: of the closed loop, in all.
    rate: requests per second of the open loop, None for the closed one. listening: a task of the closed loop asks anew
    when it has heard its answer to the end, instead of when it has it. warmup: jobs that are done first and not
    counted. audio_dir: where the audio goes, None to drop it. metrics: host:port of the servers' metrics pages.
    """

    servers: Sequence[str]
    model: str
    mode: Literal["streaming", "offline"]
    jobs: Sequence[Job]
    warmup: Sequence[Job] = ()
    tasks: int = 1
    rate: float | None = None
    listening: bool = False
    timeout: float = 120.0
    client: Literal["asyncio", "sync"] = "asyncio"
    audio_dir: Path | None = None
    metrics: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.rate is not None and self.client == "sync":
            raise ClientError("the thread client has one request per thread: use --client asyncio with a request rate")

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
        """`count` of the jobs after the warm-up; the other settings as `add_load_arguments` parsed them."""
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
            client=args.client,
            audio_dir=audio_dir,
            metrics=args.metrics,
        )

    def settings(self) -> dict[str, Any]:
        """What was asked of whom, JSON-ready."""
        return {
            "servers": list(self.servers),
            "model": self.model,
            "mode": self.mode,
            "num_tasks": None if self.rate is not None else self.tasks,
            "request_rate": self.rate,
            "listening": self.listening,
            "warmup_requests": len(self.warmup),
            "timeout_seconds": self.timeout,
            "client": self.client,
        }

    def shape(self) -> str:
        """The load in words."""
        if self.rate is not None:
            return f"{self.rate:g} requests per second"
        return f"{self.tasks} listeners" if self.listening else f"{self.tasks} at once"


def add_load_arguments(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """How many requests are asked; the caller adds how many at once."""
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--warmup-requests",
        type=natural_int,
        help=f"made first and not counted (default: one per task, {MIN_WARMUP} of different rows at least)",
    )
    group.add_argument(
        "--log-interval", type=positive_int, default=5, help="requests between two looks at the percentiles"
    )
    group.add_argument(
        "--metrics",
        nargs="+",
        default=[],
        metavar="HOST:PORT",
        help="our models' metrics pages, such as localhost:8003: adds the vocoder's mean wait and batch",
    )
    group.add_argument(
        "--client", choices=("asyncio", "sync"), default="asyncio", help="tritonclient's asyncio or thread client"
    )
    return group
