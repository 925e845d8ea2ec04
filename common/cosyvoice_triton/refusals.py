"""The last refusal for want of a place, which answers whoever comes in the next moment, at no cost."""

import math
import time
from collections.abc import Callable

# Short beside the time that a place is held, and long beside the time that a refusal takes on a busy machine.
REFUSAL_SECONDS = 0.1
FREEING_SECONDS = 0.03  # after a listener has left, who refuses may not know it yet


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
