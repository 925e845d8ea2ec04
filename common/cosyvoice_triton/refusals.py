"""The last refusal for want of a place, which answers whoever comes in the next moment, at no cost."""

import time
from collections.abc import Callable

# Short beside the time that a place is held, and long beside the time that a refusal takes on a busy machine.
REFUSAL_SECONDS = 0.1


class LastRefusal:
    """What the last one who asked for a place was told, until a moment has passed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._error: Exception | None = None
        self._until = 0.0

    def note(self, error: Exception) -> None:
        """Keep a refusal for REFUSAL_SECONDS."""
        self._error, self._until = error, self._clock() + REFUSAL_SECONDS

    @property
    def error(self) -> Exception | None:
        """The refusal that is kept, if there is one."""
        return self._error if self._clock() < self._until else None

    def check(self) -> None:
        """Raise the refusal that is kept, if there is one."""
        if (error := self.error) is not None:
            raise error.with_traceback(None)
