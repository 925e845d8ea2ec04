"""Which of the waiting chunks are rendered next, and together. Pure policy: it knows no streams, tensors or clocks."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    """A queued request as the policy sees it.

    silent_at: when its listener runs out of audio, in seconds of any clock; None while nothing has been heard yet.
    arrived: its number in the order of arrival.
    new_tokens: how many tokens it renders; None if it renders nothing and has to be served alone (a stream's start
        or end, or a chunk in error).
    """

    stream_id: int
    silent_at: float | None
    arrived: int
    new_tokens: int | None

    @property
    def urgency(self) -> tuple[bool, float, int]:
        """Smaller is earlier: streams that wait for their first audio, then the earliest silence, then arrival."""
        return self.silent_at is not None, self.silent_at or 0.0, self.arrived


def pick(waiting: Sequence[Waiting], max_chunks: int, max_tokens: int) -> list[int]:
    """Indices of the next batch, most urgent first; `waiting` is not empty.

    A batch has at most `max_chunks` chunks, and of more than one at most `max_tokens` tokens together. Chunks join the
    most urgent one if they are of its size class, that is within a factor of two: a batch costs what its largest chunk
    costs in every row. Of a stream at most one chunk is in a batch.
    """
    order = sorted(range(len(waiting)), key=lambda index: waiting[index].urgency)
    head = waiting[order[0]]
    if head.new_tokens is None:
        return order[:1]
    size = head.new_tokens.bit_length()
    batch: list[int] = []
    streams: set[int] = set()
    tokens = 0
    for index in order:
        request = waiting[index]
        # A stream's requests are served in their order: one that cannot join holds back those behind it.
        fits = request.new_tokens is not None and request.new_tokens.bit_length() == size
        if request.stream_id not in streams and fits:
            tokens += request.new_tokens or 0
            if len(batch) == max_chunks or (batch and tokens > max_tokens):
                break
            batch.append(index)
        streams.add(request.stream_id)
    return batch
