"""The progress bar of a run, with first-chunk percentiles and errors."""

import sys
from collections import deque

import numpy as np
from tqdm import tqdm

from cosyvoice_triton.load.measure import RequestOutcome

RECENT = 1000  # latest requests, over which the shown percentiles are computed
SHOWN_ERRORS = 5  # the rest are in the report


class Progress:
    """Show how many requests have ended, and when the latest were heard. interval: see `runner.measured`."""

    def __init__(self, total: int, title: str, interval: int) -> None:
        self._total = total
        self._title = title
        self._interval = interval
        self._bar: tqdm[None] | None = None
        self._audible: deque[float] = deque(maxlen=RECENT)
        self._answered = 0
        self._errors = self._refused = 0
        self._percentiles = ""

    def begins(self, phase: str) -> None:
        """Begins a new bar, because the warm-up or the measurement starts."""
        self.close()
        self._bar = tqdm(total=self._total, desc=f"{self._title}, {phase}", unit="request", leave=phase == "measuring")

    def ended(self, outcome: RequestOutcome, live: int) -> None:
        """Counts a request that has ended; `live` others are in flight."""
        assert self._bar is not None, "call begins() first"
        if outcome.refused:
            self._refused += 1
        elif outcome.failed:
            self._errors += 1
            if self._errors <= SHOWN_ERRORS:
                more = "; further ones are in the report" if self._errors == SHOWN_ERRORS else ""
                self._bar.write(f"failed: {outcome.id}: {outcome.error}{more}", file=sys.stderr)
        elif not outcome.error:
            self._answered += 1
            if (audible := outcome.audible()) is not None:
                self._audible.append(1000 * audible)
            if self._audible and (self._answered == 1 or self._answered % self._interval == 0):
                p50, p95 = np.percentile(self._audible, (50, 95))
                self._percentiles = f"first audible p50 {p50:.0f} p95 {p95:.0f} ms, "
        self._bar.set_postfix_str(
            f"{self._percentiles}{live} in flight, {self._refused} refused, {self._errors} failed", refresh=False
        )
        self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
