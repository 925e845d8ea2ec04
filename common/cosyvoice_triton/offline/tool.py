"""What the offline tools share: how their process is set up, the times of stages, and the samples that failed."""

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.load.samples import Sample

FAILURES_SHOWN = 20
AFTER_STAGE = "_time_seconds"  # as in upstream's figures


class Stages:
    """The seconds of each stage: those in which at least one sample was in it. Stages of different samples overlap."""

    def __init__(self, names: Sequence[str], clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun = clock()
        self._samples: Counter[str] = Counter()  # by the stage that they are in
        self._since: dict[str, float] = {}
        self.seconds = dict.fromkeys(names, 0.0)

    def enter(self, stage: str) -> None:
        """Note that a sample has entered a stage."""
        if not self._samples[stage]:
            self._since[stage] = self._clock()
        self._samples[stage] += 1

    def leave(self, stage: str) -> None:
        """Note that a sample has left a stage."""
        self._samples[stage] -= 1
        if not self._samples[stage]:
            self.seconds[stage] += self._clock() - self._since[stage]

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Let a sample be in a stage for the block."""
        self.enter(stage)
        try:
            yield
        finally:
            self.leave(stage)

    def figures(self, audio_seconds: float) -> dict[str, float | None]:
        """Return `<stage>_time_seconds` and `<stage>_rtf` per stage and for the pipeline, since construction; the RTF
        is None without audio."""
        figures: dict[str, float | None] = {}
        for stage, seconds in {**self.seconds, "pipeline": self._clock() - self._begun}.items():
            figures[stage + AFTER_STAGE] = seconds
            figures[stage + "_rtf"] = seconds / audio_seconds if audio_seconds else None
        return figures


class Failure(NamedTuple):
    """Why a sample has no audio."""

    id: str
    stage: str
    error: str

    @classmethod
    def of(cls, sample: Sample, stage: str, error: Exception) -> "Failure":
        reason = " ".join(str(error).split())
        if not isinstance(error, (ValueError, UnavailableError, OSError)):
            reason = f"{type(error).__name__}: {reason}"  # out of memory, or a bug
        return cls(sample.id, stage, reason)


def set_up() -> None:
    """Show warnings as plain lines; let torch use one thread, unless OMP_NUM_THREADS is set."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if "OMP_NUM_THREADS" not in os.environ:
        # The LLM has threads of its own: torch's would wait for cores that those keep busy, ten times as long.
        torch.set_num_threads(1)


def show_failures(failures: Sequence[Failure], file: str) -> None:
    """Print the first ones to standard error; all are in `file`."""
    for failure in failures[:FAILURES_SHOWN]:
        print(f"failed: {failure.id} ({failure.stage}): {failure.error}", file=sys.stderr)
    if hidden := failures[FAILURES_SHOWN:]:
        print(f"failed: {len(hidden)} more, all in {file}", file=sys.stderr)
