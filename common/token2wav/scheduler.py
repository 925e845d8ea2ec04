"""Which of the waiting chunks are rendered next, and together. Pure policy: it knows no streams, tensors or clocks."""

from collections.abc import Sequence
from dataclasses import dataclass

# What a batch costs before its first token, in tokens: 12 ms of an H200, where a token takes 0.04 ms. Measured with the
# DiT flow (docs/performance.md); the UNet's ratio is much the same.
START_TOKENS = 300
# A listener with so much audio left is in no hurry. Chunks for such listeners make batches of at most this part of the
# tokens, so that a stream that begins waits little for them, and little beside them. Where a GPU cannot keep up so,
# listeners soon have less left, and batches are larger.
PLENTY_SECONDS = 1.0
UNHURRIED_SHARE = 0.25


@dataclass(frozen=True)
class Waiting:
    """A queued request as the policy sees it.

    audio_left: how many seconds its listener can still hear, negative if it is silent; None if nothing was heard yet.
    arrived: its number in the order of arrival.
    tokens: how many the networks compute for it; None if it renders nothing and has to be served alone (a stream's
        start or end, or a chunk in error).
    """

    stream_id: int
    audio_left: float | None
    arrived: int
    tokens: int | None

    @property
    def urgency(self) -> tuple[bool, float, int]:
        """Smaller is earlier: streams that wait for their first audio, then the earliest silence, then arrival."""
        return self.audio_left is not None, self.audio_left or 0.0, self.arrived

    @property
    def hurries(self) -> bool:
        return self.audio_left is None or self.audio_left < PLENTY_SECONDS


def pick(waiting: Sequence[Waiting], max_chunks: int, max_tokens: int) -> list[int]:
    """Indices of the next batch, most urgent first; `waiting` is not empty. Of a stream at most one chunk is in it.

    A batch costs what its longest chunk costs in every row. A chunk joins if more tokens per second are rendered with
    it than without: few chunks of any lengths share what a batch costs before its first token, many of one length waste
    nothing by padding. Of more than one chunk a batch has at most `max_tokens` tokens, padding included, and a part of
    them if its last chunk is in no hurry. That bounds how long a first chunk waits for the batch before it.
    """
    order = sorted(range(len(waiting)), key=lambda index: waiting[index].urgency)
    if waiting[order[0]].tokens is None:
        return order[:1]
    batch: list[int] = []
    streams: set[int] = set()
    longest = own = 0  # of the batch's chunks: the most tokens, and all together
    for index in order:
        request = waiting[index]
        # A stream's requests are served in their order: one that cannot join holds back those behind it.
        if request.stream_id not in streams and request.tokens is not None:
            before, padded = longest * len(batch), max(longest, request.tokens) * (len(batch) + 1)
            allowed = max_tokens if request.hurries else max_tokens * UNHURRIED_SHARE
            pays = (own + request.tokens) * (START_TOKENS + before) >= own * (START_TOKENS + padded)
            if not batch or (pays and padded <= allowed and len(batch) < max_chunks):
                batch.append(index)
                longest, own = max(longest, request.tokens), own + request.tokens
        streams.add(request.stream_id)
    return batch
