"""Times of a run: seconds per stage, and per second of audio."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

AFTER_STAGE = "_time_seconds"  # as in upstream's figures


class Stages:
    """A stopwatch per stage. Stages run one after another, so their times do not overlap."""

    def __init__(self, names: Sequence[str], clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun = clock()
        self.seconds = dict.fromkeys(names, 0.0)

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        begun = self._clock()
        try:
            yield
        finally:
            self.seconds[stage] += self._clock() - begun

    def total(self) -> float:
        """Return the seconds since construction."""
        return self._clock() - self._begun

    def figures(self, audio_seconds: float, total: float) -> dict[str, float | None]:
        """Return `<stage>_time_seconds` and `<stage>_rtf` per stage and for the pipeline; the RTF is None without
        audio."""
        figures: dict[str, float | None] = {}
        for stage, seconds in {**self.seconds, "pipeline": total}.items():
            figures[stage + AFTER_STAGE] = seconds
            figures[stage + "_rtf"] = seconds / audio_seconds if audio_seconds else None
        return figures
