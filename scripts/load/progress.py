"""A run with a bar: how far it is, first-chunk percentiles so far, errors as they come."""

import asyncio

import numpy as np
from tqdm import tqdm

from scripts.load.measure import Outcome, Run
from scripts.load.plan import Load
from scripts.load.runner import run

SHOWN_ERRORS = 5  # the others are in the report


def measured(load: Load, title: str, interval: int) -> Run:
    """Do `load`. interval: the percentiles are computed anew after so many requests. ClientError as `runner.run`."""
    with tqdm(total=len(load.jobs), desc=title, unit="request") as bar:
        bar.set_postfix_str("warming up")
        return asyncio.run(run(load, _Progress(bar, interval)))


class _Progress:
    def __init__(self, bar: "tqdm[None]", interval: int) -> None:
        self._bar = bar
        self._interval = interval
        self._first_chunks: list[float] = []
        self._errors = 0
        self._percentiles = ""

    def __call__(self, outcome: Outcome, live: int) -> None:
        if outcome.error:
            self._errors += 1
            if self._errors <= SHOWN_ERRORS:
                more = "; further ones are in the report" if self._errors == SHOWN_ERRORS else ""
                self._bar.write(f"failed: {outcome.id}: {outcome.error}{more}")
        else:
            self._first_chunks.append(1000 * outcome.arrivals[0])
            if len(self._first_chunks) % self._interval in (0, 1):
                p50, p95 = np.percentile(self._first_chunks, (50, 95))
                self._percentiles = f"first chunk p50 {p50:.0f} p95 {p95:.0f} ms, "
        self._bar.set_postfix_str(f"{self._percentiles}{live} under way, {self._errors} failed", refresh=False)
        self._bar.update()
