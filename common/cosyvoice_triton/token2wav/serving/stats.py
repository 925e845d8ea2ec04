"""The numbers of a token2wav service, for its metrics."""

from typing import NamedTuple

from cosyvoice_triton.monitoring.metrics import (
    BATCHES,
    CACHE,
    CHUNKS,
    QUEUED,
    STREAMS,
    WAITED,
    Values,
)


class Stats(NamedTuple):
    """`live_streams`, `queued` and `cache_bytes` are current values, the others sums since the start.

    `chunks` / `batches` is the mean batch size, `waited_seconds` / `chunks` the mean wait from a chunk's arrival to the
    start of its batch. `cache_bytes`: memory of streams and prompt caches. `admission`: its numbers by metric.
    """

    live_streams: int
    queued: int
    cache_bytes: int
    batches: int
    chunks: int
    waited_seconds: float
    admission: Values

    def values(self) -> Values:
        """Return these numbers by metric."""
        metrics = (STREAMS, QUEUED, CACHE, BATCHES, CHUNKS, WAITED)
        return {**dict(zip(metrics, self[:-1], strict=True)), **self.admission}
