"""Which of the waiting chunks are rendered next, and together. Pure policy: it knows no streams, tensors or clocks."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    """A queued request as the policy sees it.

    silent_at: when its listener runs out of audio, in seconds of any clock; None while nothing has been heard yet.
    arrived: its number in the order of arrival.
    tokens: how many the networks compute for it; None if it renders nothing and has to be served alone (a stream's
        start or end, or a chunk in error).
    """

    stream_id: int
    silent_at: float | None
    arrived: int
    tokens: int | None

    @property
    def urgency(self) -> tuple[bool, float, int]:
        """Smaller is earlier: streams that wait for their first audio, then the earliest silence, then arrival."""
        return self.silent_at is not None, self.silent_at or 0.0, self.arrived


def pick(waiting: Sequence[Waiting], max_chunks: int, max_tokens: int) -> list[int]:
    """Indices of the next batch, most urgent first; `waiting` is not empty. Of a stream at most one chunk is in it.

    A batch costs what its longest chunk costs in every row. Of more than one chunk it has at most `max_tokens` tokens,
    padding included, which bounds how long a first chunk waits for the batch before it. Chunks of all lengths share
    one: what is padded costs less than what a batch of its own would cost before its first token.
    """
    order = sorted(range(len(waiting)), key=lambda index: waiting[index].urgency)
    if waiting[order[0]].tokens is None:
        return order[:1]
    batch: list[int] = []
    streams: set[int] = set()
    longest = 0
    for index in order:
        request = waiting[index]
        # A stream's requests are served in their order: one that cannot join holds back those behind it.
        if request.stream_id not in streams and request.tokens is not None:
            padded = max(longest, request.tokens) * (len(batch) + 1)
            if not batch or (padded <= max_tokens and len(batch) < max_chunks):
                batch.append(index)
                longest = max(longest, request.tokens)
        streams.add(request.stream_id)
    return batch
