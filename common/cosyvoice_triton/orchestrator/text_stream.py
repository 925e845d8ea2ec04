"""Texts, and speech to convert, that arrive in pieces: a Triton sequence to the orchestrator.

START is the request whose answer is the audio; it has the voice, the parameters and the first piece. Later requests
with the same correlation id add a piece each and have no answer of their own; END ends them. The pieces belong to the
START request: they are bounded, and gone when it ends, is cancelled or has waited too long for the next one.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from async_timeout import timeout

SequenceId = int | str  # Triton's correlation id
Piece = str | np.ndarray  # part of a text, or samples (N,)


class Limit(NamedTuple):
    """Of what arrives: the input's name, the most of it, and what that counts."""

    name: str
    most: int
    unit: str


class PieceStream:
    """The pieces of one request: an async iterator over them, in their order.

    Iterating raises ValueError if there is no next piece for `idle_seconds`. Belongs to one asyncio loop.
    """

    def __init__(self, limit: Limit, idle_seconds: float) -> None:
        self._limit = limit
        self._idle_seconds = idle_seconds
        self._length = 0
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()  # None: the end
        self._ended = False

    def add(self, piece: Piece, end: bool) -> None:
        """Append a piece. ValueError if there are more than the limit allows, or the last one has come."""
        name, most, unit = self._limit
        if self._ended:
            raise ValueError(f"{name} has ended already")
        if len(piece) and isinstance(piece, str) != (unit == "characters"):
            raise ValueError(f"the request began with {name}, and this piece of it has another input")
        if (length := self._length + len(piece)) > most:
            raise ValueError(f"{name} has {length} {unit} in its pieces so far, more than the limit of {most}")
        self._length = length
        if len(piece):  # empty ones are not kept: there is no limit to their number
            self._pieces.put_nowait(piece)
        if end:
            self._ended = True
            self._pieces.put_nowait(None)

    def __aiter__(self) -> "PieceStream":
        return self

    async def __anext__(self) -> Piece:
        try:
            async with timeout(self._idle_seconds):
                piece = await self._pieces.get()
        except asyncio.TimeoutError:
            raise ValueError(
                f"{self._limit.name} has not ended, and there was no further piece of it for {self._idle_seconds:g} s"
            ) from None
        if piece is None:
            raise StopAsyncIteration
        return piece


class PieceStreams:
    """What still arrives, by the correlation id of its sequence."""

    def __init__(self, idle_seconds: float) -> None:
        self._idle_seconds = idle_seconds
        self._live: dict[SequenceId, PieceStream] = {}

    @contextmanager
    def open(self, sequence: SequenceId, limit: Limit) -> Iterator[PieceStream]:
        """Keep the pieces for the block. ValueError if the sequence is live."""
        if sequence in self._live:
            raise ValueError(f"sequence id {sequence} is in use: choose a random one for each request in pieces")
        self._live[sequence] = PieceStream(limit, self._idle_seconds)
        try:
            yield self._live[sequence]
        finally:
            del self._live[sequence]

    def add(self, sequence: SequenceId, piece: Piece, end: bool) -> None:
        """Append a piece to a live request. ValueError if there is no such sequence, or it cannot get the piece."""
        if sequence not in self._live:
            raise ValueError(f"no request in pieces has the sequence id {sequence}: it ended, failed or never started")
        self._live[sequence].add(piece, end)
