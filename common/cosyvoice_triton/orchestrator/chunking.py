"""Divides a stream of speech tokens into hops, the new tokens of each chunk that token2wav renders.

Pure policy: it counts tokens and reads a clock; it uses no network and no server.

    exponential   hops double up to the cap: the first audio comes early, later chunks cost less per second
    equal         every hop has the same length
    time_based    hops follow the number of tokens that are ready and the audio that the listener still has buffered

Later segments of a text do not start again with the smallest hop: their listener has audio left. The hops of
`exponential` and `equal` depend on the numbers of tokens alone, never on when they arrive, so a text whose first hop is
not short always sounds the same; `FirstHops` says which ones are short.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from cosyvoice_triton.config import ChunkStrategy, OrchestratorConfig
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, OVERLAP_FRAMES, TOKEN_MEL_RATIO, TOKEN_RATE
from cosyvoice_triton.profiles import H200, FirstHopNumbers

# token2wav withholds the audio of this many tokens from every chunk but the final one, for the next cross-fade.
WITHHELD_TOKENS = OVERLAP_FRAMES // TOKEN_MEL_RATIO

# time_based measures the audio that the listener still has in units of the time that a chunk takes to render. Above
# COMFORTABLE_CHUNKS it waits for more tokens than are ready, below TIGHT_CHUNKS it stops waiting.
COMFORTABLE_CHUNKS = 4.0
TIGHT_CHUNKS = 2.0


@dataclass(frozen=True)
class Hop:
    """The next tokens of a stream to render: `length` tokens from `offset` on.

    All hops but the final one are rendered with LOOKAHEAD_TOKENS more after their end.
    """

    offset: int
    length: int
    final: bool

    @property
    def end_of_context(self) -> int:
        """Return the end of the tokens that the networks are given: the hop's own and the look-ahead."""
        return self.offset + self.length + (0 if self.final else LOOKAHEAD_TOKENS)


@dataclass(frozen=True, kw_only=True)
class HopRules:
    """How the streams of a model are divided into hops. All lengths count speech tokens.

    first_hop: minimum length of the first hop, and the unit of later ones.
    short_first_hop: minimum length of a short first hop; there is none if it is not below `first_hop`.
    max_hop: maximum length; the final hop may be LOOKAHEAD_TOKENS - 1 longer.
    boundary: hops end on multiples of it, counted from the prompt's first token (the UNet flow's training chunk).
        1 for a flow that has no such boundaries.
    """

    strategy: ChunkStrategy = OrchestratorConfig.dynamic_chunk_strategy
    first_hop: int = OrchestratorConfig.first_hop_tokens
    short_first_hop: int = OrchestratorConfig.short_first_hop_tokens
    max_hop: int = OrchestratorConfig.max_hop_tokens
    boundary: int = 1

    def __post_init__(self) -> None:
        if self.strategy not in get_args(ChunkStrategy):
            names = ", ".join(get_args(ChunkStrategy))
            raise ValueError(f"chunk strategy must be one of {names}, not {self.strategy!r}")
        if (shortest := min(self.first_hop, self.short_first_hop)) <= WITHHELD_TOKENS:
            raise ValueError(
                f"the first hop of {shortest} tokens gives no audio: token2wav withholds {WITHHELD_TOKENS}"
            )
        if self.max_hop < self.unit or self.max_hop % self.boundary:
            raise ValueError(
                f"the largest hop of {self.max_hop} tokens must be a multiple of {self.boundary}, at least {self.unit}"
            )

    @cached_property
    def unit(self) -> int:
        """Return the length that later hops are multiples of: `first_hop`, rounded up to the boundary."""
        return math.ceil(self.first_hop / self.boundary) * self.boundary

    @property
    def has_short_first_hop(self) -> bool:
        return self.strategy != "equal" and self.short_first_hop < self.first_hop

    def first_length(self, prompt_tokens: int, *, short: bool = False, silent: int = 0) -> int:
        """Return the length of a text's first hop: extended to a boundary, so it is never shorter than configured.

        silent: how many of its tokens are not heard, because their audio is cut; it has as many more.
        """
        least = (self.short_first_hop if short else self.first_hop) + silent
        return least + -(prompt_tokens + least) % self.boundary

    def first_context(self, prompt_tokens: int | None, *, short: bool = False, silent: int = 0) -> int:
        """Return how many tokens the LLM makes before the first chunk; the most for a prompt not yet known."""
        if prompt_tokens is None:
            return LOOKAHEAD_TOKENS + (self.short_first_hop if short else self.first_hop) + silent + self.boundary - 1
        return LOOKAHEAD_TOKENS + self.first_length(prompt_tokens, short=short, silent=silent)

    def schedule(
        self,
        prompt_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        short: bool = False,
        silent: int = 0,
        speed: float = 1.0,
    ) -> "HopSchedule":
        """Return the schedule of a text, spoken with a prompt of `prompt_tokens` tokens. short: its first hop is.
        silent: see `first_length`. speed: of the speech, 2 if a token has half of its audio."""
        first = self.first_length(prompt_tokens, short=short, silent=silent)
        if self.strategy == "time_based":
            return TimeBasedSchedule(self, prompt_tokens, short, first, clock, speed)
        return HopSchedule(self, prompt_tokens, short, first)


class HopSchedule:
    """The hops of a text, which may have several segments: strategies `exponential` and `equal`."""

    def __init__(self, rules: HopRules, prompt_tokens: int, short: bool, first: int):
        self._rules = rules
        self._prompt_tokens = prompt_tokens
        self._short = short
        self._doublings = 0  # of `rules.unit`, for the next hop
        self._before = 0  # tokens of the segments before this one
        self._offset = 0
        self._finished = False
        self._first_length = first
        self._shortest = rules.first_length(prompt_tokens)
        self._cut = 0.0  # seconds of the audio so far that were not sent
        self._begun = (0, 0.0)  # doublings and cut when the segment began

    def begin_segment(self) -> None:
        """Let the next hops be those of the text's next segment, whose tokens are counted from 0.

        Its first hop is the longest one of at most as many tokens as the segments before it had. An LLM of twice the
        real-time rate makes them before the listener, who has half of that audio left at least, has played it.
        """
        self._before += self._offset
        self._offset, self._finished = 0, False
        self._doublings = max(0, (self._before // self._rules.unit).bit_length() - 1)

        self._begun = (self._doublings, self._cut)

    def restart_segment(self) -> None:
        """Let the next hops be those of the same segment again."""
        self._offset, self._finished = 0, False
        self._doublings, self._cut = self._begun

    def next_hop(self, available: int, ended: bool) -> Hop | None:
        """Return the next hop to render, given that the LLM has made `available` tokens and may have `ended`.

        None if more tokens are needed, and after the final hop. A call implies that the previous hop's audio has been
        sent. The final hop is never empty, because every other hop leaves its look-ahead to the hops after it.
        """
        pending = available - self._offset
        if self._finished or pending == 0:
            return None
        rules = self._rules
        length = self._first_length
        if self._before + self._offset:
            length = self._later_hop(pending - LOOKAHEAD_TOKENS)
            # The tokens of a segment follow the prompt, which may end between two boundaries.
            if beyond := (self._prompt_tokens + self._offset + length) % rules.boundary:
                length = max(length - beyond, self._shortest)
        if pending >= length + LOOKAHEAD_TOKENS:
            hop = Hop(self._offset, length, final=False)
        elif ended:
            hop = Hop(self._offset, pending, final=True)
        else:
            return None
        # A first hop that is short, or was extended to a boundary, is no unit: the doubling then starts after it.
        if self._before + self._offset or not (self._short or rules.boundary > 1):
            self._doublings += 1
        self._offset += hop.length
        self._finished = hop.final
        return hop

    def cut(self, seconds: float) -> None:
        """Take note that so much of the audio was not sent, because it is silence."""
        self._cut += seconds

    def _later_hop(self, ready: int) -> int:
        """Return the length of a hop that is not the first of the text, before it is cut to a boundary. ready: tokens
        that could be rendered now."""
        rules = self._rules
        if rules.strategy == "equal":
            return rules.unit
        return min(rules.unit << self._doublings, rules.max_hop)


class TimeBasedSchedule(HopSchedule):
    """Renders what is ready in whole units, and waits for one more unit while the listener has enough audio.

    The cost of a chunk hardly grows with its length, so the fewest chunks that keep the listener supplied cost least.
    """

    def __init__(
        self, rules: HopRules, prompt_tokens: int, short: bool, first: int, clock: Callable[[], float], speed: float
    ):
        super().__init__(rules, prompt_tokens, short, first)
        self._clock = clock
        self._token_rate = TOKEN_RATE * speed
        self._hops = 0
        self._rendering_since: float | None = None
        self._rendering_seconds = 0.0
        self._playing_since: float | None = None
        self._target: int | None = None  # fixed once per hop: one that grew with the ready tokens is never reached

    def next_hop(self, available: int, ended: bool) -> Hop | None:
        now = self._clock()
        if self._rendering_since is not None:
            self._rendering_seconds += now - self._rendering_since
            self._rendering_since = None
        if self._hops and self._playing_since is None:
            self._playing_since = now
        hop = super().next_hop(available, ended)
        if hop is not None:
            self._hops += 1
            self._rendering_since = now
            self._target = None
        return hop

    def _later_hop(self, ready: int) -> int:
        unit = self._rules.unit
        largest = self._rules.max_hop // unit * unit
        whole = min(max(ready // unit * unit, unit), largest)
        spare = self._spare_chunks()
        if self._target is None:
            self._target = min(whole + unit, largest) if spare > COMFORTABLE_CHUNKS else whole
        elif spare < TIGHT_CHUNKS:
            self._target = min(self._target, whole)
        return self._target

    def _spare_chunks(self) -> float:
        """Return how many chunks could be rendered before the listener has played all audio."""
        assert self._playing_since is not None
        sent_seconds = (self._before + self._offset - WITHHELD_TOKENS) / self._token_rate - self._cut
        buffered_seconds = sent_seconds - (self._clock() - self._playing_since)
        chunk_seconds = self._rendering_seconds / self._hops
        return buffered_seconds / max(chunk_seconds, 1e-3)


class FirstHops:
    """Decides which streams of a process begin with a short first hop: those of a server that has slack.

    A short first hop is rendered sooner, because the LLM makes fewer tokens before it. It also gives its listener less
    audio, so the second chunk has to come sooner. Whether it will is measured: the time between the first two chunks of
    earlier streams, which waited for as many tokens or more. No stream begins with a short hop unless the second chunks
    of the last streams all came early enough, nor while others that began so wait for theirs: nobody knows yet what a
    crowd that comes at once will wait for.

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
        has_slack = len(self._seconds) == self._seconds.maxlen and max(self._seconds) <= self._limit_seconds
        possible = played and not repeatable and self._possible
        short = possible and has_slack and self._waiting < self._numbers.max_at_once
        self._waiting += short
        return StreamOpening(short, measured=played)

    def sent(self, opening: "StreamOpening", hop: Hop, now: float, missing: float = 0.0) -> None:
        """Take note that a chunk's audio was sent, `missing` so many seconds of what its hop counts on. A final one is
        not measured: others have more tokens."""
        if opening.first_at is None and not hop.final:
            opening.first_at = now - missing  # the second chunk has to come so much sooner
        elif not opening.ended:
            if opening.first_at is not None and opening.measured and not hop.final:
                self._seconds.append(now - opening.first_at)
            self.end(opening)

    def end(self, opening: "StreamOpening") -> None:
        """End an opening, also where a stream ends before its second chunk. Further calls do nothing."""
        self._waiting -= opening.short and not opening.ended
        opening.ended = True


@dataclass
class StreamOpening:
    """The first two chunks of a stream: whether its first hop is short, whether the time between them is measured, and
    when the first one was sent."""

    short: bool
    measured: bool
    first_at: float | None = None
    ended: bool = False
