"""How much audio the listener of a stream has left: what scheduling, chunk lengths and admission are decided by."""

PLAYER_SECONDS = 0.25  # a player begins this long after the first audio: by how much a chunk may be late without a gap


class Playback:
    """A listener who plays audio from its arrival on. A gap of theirs puts off all that is played after it.

    left: seconds of audio that the listener already has when counting begins, `now` seconds on the caller's clock; None
    if there is none yet. buffer: seconds that their player waits after the first audio.
    """

    def __init__(self, left: float | None = None, now: float = 0.0, buffer: float = PLAYER_SECONDS) -> None:
        self._ends = None if left is None else now + left
        self._buffer = buffer

    def add(self, seconds: float, now: float) -> float:
        """Count audio that was sent to the listener. Returns the seconds of silence in their player before it."""
        if not seconds:
            return 0.0
        ends = now if self._ends is None else self._ends
        gap = max(0.0, now - self._buffer - ends)
        self._ends = ends + gap + seconds
        return gap

    def left(self, now: float) -> float | None:
        """Return seconds of audio that are not played yet, negative since they ran out; None before the first audio."""
        return None if self._ends is None else self._ends - now
