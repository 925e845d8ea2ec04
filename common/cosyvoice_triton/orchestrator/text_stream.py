"""Texts that arrive in pieces: a Triton sequence to the orchestrator.

START is the request whose answer is the audio; it has the voice, the parameters and the first piece. Later requests
with the same correlation id add a piece each and have no answer of their own; END ends the text. The pieces belong to
the START request: they are bounded, and gone when it ends, is cancelled or has waited too long for the next one.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from async_timeout import timeout

SequenceId = int | str  # Triton's correlation id


class TextStream:
    """The text of one request: an async iterator over its pieces, in their order.

    Iterating raises ValueError if there is no next piece for `idle_seconds`. Belongs to one asyncio loop.
    """

    def __init__(self, max_chars: int, idle_seconds: float) -> None:
        self._max_chars = max_chars
        self._idle_seconds = idle_seconds
        self._chars = 0
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()  # None: the end
        self._ended = False

    def add(self, piece: str, end: bool) -> None:
        """Append a piece. ValueError if the text is longer than `max_chars`, or has ended."""
        if self._ended:
            raise ValueError("the text has ended already")
        if self._chars + len(piece) > self._max_chars:
            raise ValueError(
                f"target_text has {self._chars + len(piece)} characters in its pieces so far, more than the limit of "
                f"{self._max_chars}"
            )
        self._chars += len(piece)
        if piece:  # empty ones are not kept: there is no limit to their number
            self._pieces.put_nowait(piece)
        if end:
            self._ended = True
            self._pieces.put_nowait(None)

    def __aiter__(self) -> "TextStream":
        return self

    async def __anext__(self) -> str:
        try:
            async with timeout(self._idle_seconds):
                piece = await self._pieces.get()
        except asyncio.TimeoutError:
            raise ValueError(
                f"target_text has not ended, and there was no further piece of it for {self._idle_seconds:g} s"
            ) from None
        if piece is None:
            raise StopAsyncIteration
        return piece


class TextStreams:
    """The texts that still arrive, by the correlation id of their sequence."""

    def __init__(self, max_chars: int, idle_seconds: float) -> None:
        self._max_chars = max_chars
        self._idle_seconds = idle_seconds
        self._live: dict[SequenceId, TextStream] = {}

    @contextmanager
    def open(self, sequence: SequenceId) -> Iterator[TextStream]:
        """Keep a text for the block. ValueError if the sequence is live."""
        if sequence in self._live:
            raise ValueError(f"sequence id {sequence} is in use: choose a random one for each text in pieces")
        self._live[sequence] = TextStream(self._max_chars, self._idle_seconds)
        try:
            yield self._live[sequence]
        finally:
            del self._live[sequence]

    def add(self, sequence: SequenceId, piece: str, end: bool) -> None:
        """Append a piece to a live text. ValueError if there is no such sequence, or its text cannot get the piece."""
        if sequence not in self._live:
            raise ValueError(f"no text in pieces has the sequence id {sequence}: it ended, failed or never started")
        self._live[sequence].add(piece, end)
