"""How much audio the listener of a stream has left: what scheduling, chunk lengths and admission are decided by."""


class Playback:
    """A listener who plays audio from its arrival on, without a pause.

    left: seconds of audio that the listener already has when counting begins, `now` seconds on the caller's clock; None
    if there is none yet.
    """

    def __init__(self, left: float | None = None, now: float = 0.0) -> None:
        self._ends = None if left is None else now + left

    def add(self, seconds: float, now: float) -> None:
        """Count audio that was sent to the listener."""
        if seconds:
            self._ends = (now if self._ends is None else self._ends) + seconds

    def left(self, now: float) -> float | None:
        """Seconds of audio that are not played yet, negative since they ran out; None before the first audio."""
        return None if self._ends is None else self._ends - now
