"""Conditions that become true in other threads, and a clock that stands still."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds: float = 60.0, every: float = 0.005) -> None:
    """Wait until `condition` holds, which is asked `every` so often; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(every)


class Clock:
    """A clock whose time is what a test sets."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
