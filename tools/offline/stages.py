"""Where the time of a run goes: seconds of each stage, and what they are for a second of audio."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

AFTER_STAGE = "_time_seconds"  # upstream's names of these figures


class Stages:
    """A stopwatch per stage. Stages take turns, so that the time of one holds nothing of another's."""

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
        """Seconds since this was made."""
        return self._clock() - self._begun

    def figures(self, audio_seconds: float, total: float) -> dict[str, float | None]:
        """`<stage>_time_seconds` and `<stage>_rtf` of each stage and of the whole; no audio has no RTF."""
        figures: dict[str, float | None] = {}
        for stage, seconds in {**self.seconds, "pipeline": total}.items():
            figures[stage + AFTER_STAGE] = seconds
            figures[stage + "_rtf"] = seconds / audio_seconds if audio_seconds else None
        return figures


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table whose columns line up in a terminal too."""
    cells = [[_shown(value) for value in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
