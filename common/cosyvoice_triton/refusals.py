"""Refusals for want of a place: the last one, which answers others in the next moment at no cost, and their log."""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable

logger = logging.getLogger(__name__)

# Short beside the time that a place is held, and long beside the time that a refusal takes on a busy machine.
REFUSAL_SECONDS = 0.1
FREEING_SECONDS = 0.03  # after a listener has left, who refuses may not know it yet
LOG_SECONDS = 60.0  # a crowd that is refused would fill the log


class LastRefusal:
    """What the last one who asked for a place was told, until a moment has passed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._error: Exception | None = None
        self._at = self._freed = -math.inf

    def note(self, error: Exception) -> None:
        """Keep a refusal for REFUSAL_SECONDS, and for all who wait already; none just after a place became free."""
        if (now := self._clock()) >= self._freed + FREEING_SECONDS:
            self._error, self._at = error, now

    def forget(self) -> None:
        """Refuse nobody with it any more, because a place becomes free."""
        self._at, self._freed = -math.inf, self._clock()

    def error(self, since: float = math.inf) -> Exception | None:
        """Return the refusal that answers whoever has waited since a time of the clock (inf: not waited), or None."""
        return self._error if since <= self._at or self._clock() < self._at + REFUSAL_SECONDS else None

    def check(self, since: float = math.inf) -> None:
        """Raise what `error` returns, if it does."""
        if (error := self.error(since)) is not None:
            raise error.with_traceback(None)


class RefusalLog:
    """Logs in one line how many were refused, and why, for each LOG_SECONDS in which somebody was. Safe to use from any
    thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._timer: threading.Timer | None = None

    def note(self, reason: str) -> None:
        """Count one refusal; the line comes LOG_SECONDS after the first one."""
        with self._lock:
            if not self._counts:
                self._timer = threading.Timer(LOG_SECONDS, self.write)
                self._timer.daemon = True
                self._timer.start()
            self._counts[reason] += 1

    def write(self) -> None:
        """Log the refusals that are not yet in the log now, if there are any, as whoever refuses no more does."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            if self._timer is not None:
                self._timer.cancel()
        if counts:
            reasons = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
            logger.warning("refused within %.0f s: %s", LOG_SECONDS, reasons)
