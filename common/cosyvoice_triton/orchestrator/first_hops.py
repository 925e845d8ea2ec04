"""Which streams begin with a short first hop: those of a server that has slack.

A short first hop is rendered sooner, because the LLM makes fewer tokens before it. It also gives its listener less
audio, so that the second chunk has to come sooner. Whether it will is measured: the time between the first two chunks
of the streams before, which waited for as many tokens or more. No stream begins with a short hop unless all of the last
ones had enough time, nor while others that began so wait for their second chunk: nobody knows yet what a crowd that
comes at once will wait for.

Pure policy: it counts streams and seconds; it uses no network and no server.
"""

from collections import deque

from cosyvoice_triton.constants import TOKEN_RATE
from cosyvoice_triton.orchestrator.chunking import WITHHELD_TOKENS, Hop, HopRules

MEASURED = 4  # streams of which the slowest one decides
MARGIN_SECONDS = 0.04  # audio that a player without a buffer has left when the second chunk comes
MOST_AT_ONCE = 2  # streams that wait for their second chunk after a short first hop


class FirstHops:
    """Chooses for the streams of one process, and learns from them."""

    def __init__(self, rules: HopRules) -> None:
        self._possible = rules.has_short_first_hop
        self._limit_seconds = (rules.short_first_hop - WITHHELD_TOKENS) / TOKEN_RATE - MARGIN_SECONDS
        self._seconds: deque[float] = deque(maxlen=MEASURED)
        self._waiting = 0

    def start(self, *, heard: bool, repeatable: bool) -> "StreamStart":
        """heard: somebody plays the stream while it is made, of a text that is complete; others are not measured.
        repeatable: the same request gives the same audio. Only the first hop of one that is heard and not repeatable
        may be short."""
        possible = heard and not repeatable and self._possible
        short = possible and self._waiting < MOST_AT_ONCE and self._have_slack()
        self._waiting += short
        return StreamStart(self, short=short, measured=heard)

    def _have_slack(self) -> bool:
        return len(self._seconds) == MEASURED and max(self._seconds) <= self._limit_seconds

    def ended(self, start: "StreamStart", seconds: float | None) -> None:
        """seconds: between the first two chunks, if the stream had them."""
        self._waiting -= start.short
        if seconds is not None:
            self._seconds.append(seconds)


class StreamStart:
    """The first two chunks of a stream. short: whether its first hop is."""

    def __init__(self, first_hops: FirstHops, *, short: bool, measured: bool) -> None:
        self.short = short
        self._first_hops: FirstHops | None = first_hops  # None: it has ended
        self._measured = measured
        self._first_at: float | None = None

    def sent(self, hop: Hop, now: float) -> None:
        """The audio of a chunk. A final one is not measured: others have more tokens."""
        if hop.final or self._first_at is not None:
            self.end(None if hop.final or not self._measured or self._first_at is None else now - self._first_at)
        else:
            self._first_at = now

    def end(self, seconds: float | None = None) -> None:
        """Also where a stream ends before its second chunk; further calls do nothing."""
        first_hops, self._first_hops = self._first_hops, None
        if first_hops is not None:
            first_hops.ended(self, seconds)
