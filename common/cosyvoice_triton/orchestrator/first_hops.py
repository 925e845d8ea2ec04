"""Decides which streams begin with a short first hop: those of a server that has slack.

A short first hop is rendered sooner, because the LLM makes fewer tokens before it. It also gives its listener less
audio, so the second chunk has to come sooner. Whether it will is measured: the time between the first two chunks of
earlier streams, which waited for as many tokens or more. No stream begins with a short hop unless the second chunks of
the last streams all came early enough, nor while others that began so wait for theirs: nobody knows yet what a crowd
that comes at once will wait for.

Pure policy: it counts streams and seconds; it uses no network and no server.
"""

from collections import deque

from cosyvoice_triton.constants import TOKEN_RATE
from cosyvoice_triton.orchestrator.chunking import WITHHELD_TOKENS, Hop, HopRules
from cosyvoice_triton.profiles import H200, FirstHopNumbers


class FirstHops:
    """Chooses for the streams of one process, and learns from them.

    Its numbers are the same in every profile: they are compared with what the server was measured to need.
    """

    def __init__(self, rules: HopRules, numbers: FirstHopNumbers = H200.first_hops) -> None:
        self._possible = rules.has_short_first_hop
        self._numbers = numbers
        self._limit_seconds = (rules.short_first_hop - WITHHELD_TOKENS) / TOKEN_RATE - numbers.margin_seconds
        self._seconds: deque[float] = deque(maxlen=numbers.measured_streams)
        self._waiting = 0

    def open(self, *, played: bool, repeatable: bool) -> "StreamOpening":
        """Return the opening of a new stream.

        played: somebody plays the stream while it is made, of a text that is complete; others are not measured.
        repeatable: the same request gives the same audio. Only a stream that is played and not repeatable may have a
        short first hop.
        """
        possible = played and not repeatable and self._possible
        short = possible and self._waiting < self._numbers.max_at_once and self._has_slack()
        self._waiting += short
        return StreamOpening(self, short=short, measured=played)

    def _has_slack(self) -> bool:
        return len(self._seconds) == self._seconds.maxlen and max(self._seconds) <= self._limit_seconds

    def ended(self, opening: "StreamOpening", seconds: float | None) -> None:
        """Take note that an opening has ended, with the seconds between the first two chunks if they were measured."""
        self._waiting -= opening.short
        if seconds is not None:
            self._seconds.append(seconds)


class StreamOpening:
    """The first two chunks of a stream. `short` says whether its first hop is short."""

    def __init__(self, first_hops: FirstHops, *, short: bool, measured: bool) -> None:
        self.short = short
        self._first_hops: FirstHops | None = first_hops  # None: it has ended
        self._measured = measured
        self._first_at: float | None = None

    def sent(self, hop: Hop, now: float) -> None:
        """Take note that a chunk's audio was sent. A final one is not measured: others have more tokens."""
        if hop.final or self._first_at is not None:
            self.end(None if hop.final or not self._measured or self._first_at is None else now - self._first_at)
        else:
            self._first_at = now

    def end(self, seconds: float | None = None) -> None:
        """End the opening, also where a stream ends before its second chunk. Further calls do nothing."""
        first_hops, self._first_hops = self._first_hops, None
        if first_hops is not None:
            first_hops.ended(self, seconds)
