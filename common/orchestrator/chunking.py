"""Where a stream of speech tokens is cut into the chunks that are rendered one after another.

Pure policy: it counts tokens and reads a clock, and knows neither networks nor servers.

    exponential   hops double up to the cap: the first audio comes early, later chunks cost less per second
    equal         every hop is the same
    time_based    hops follow the LLM's backlog and how much audio the listener still has

Cuts of `exponential` and `equal` depend on the number of tokens alone, never on when they arrive, so that one
utterance always sounds the same.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from common.constants import LOOKAHEAD_TOKENS, OVERLAP_FRAMES, TOKEN_MEL_RATIO, TOKEN_RATE

Strategy = Literal["exponential", "equal", "time_based"]

# The vocoder withholds the audio of this many tokens from every chunk but the last, for the next cross-fade.
WITHHELD_TOKENS = OVERLAP_FRAMES // TOKEN_MEL_RATIO

# time_based counts the audio that the listener still has in units of what a chunk takes to render: above COMFORTABLE
# it waits for more tokens than there are, below TIGHT it stops waiting.
COMFORTABLE_CHUNKS = 4.0
TIGHT_CHUNKS = 2.0


@dataclass(frozen=True)
class Chunk:
    """Render tokens `offset` to `end`. All but the final chunk are rendered with look-ahead behind `end`."""

    offset: int
    hop: int
    final: bool

    @property
    def end(self) -> int:
        return self.offset + self.hop

    @property
    def end_of_context(self) -> int:
        """End of the tokens that the networks see: the chunk's own and the look-ahead."""
        return self.end if self.final else self.end + LOOKAHEAD_TOKENS


@dataclass(frozen=True, kw_only=True)
class HopRules:
    """How streams are cut, for all streams of a model. Hops count speech tokens.

    first_hop: least hop of the first chunk, and the unit of the later ones.
    max_hop: largest hop; the final chunk may be LOOKAHEAD_TOKENS - 1 longer.
    boundary: chunks end on its multiples, counted from the prompt's first token (the UNet flow's training chunk).
        1 for a flow that may be cut anywhere.
    """

    strategy: Strategy = "exponential"
    first_hop: int = 15
    max_hop: int = 100
    boundary: int = 1

    def __post_init__(self) -> None:
        if self.strategy not in ("exponential", "equal", "time_based"):
            raise ValueError(f"chunk strategy must be exponential, equal or time_based, not {self.strategy!r}")
        if self.first_hop <= WITHHELD_TOKENS:
            raise ValueError(
                f"the first hop of {self.first_hop} tokens gives no audio: the vocoder withholds {WITHHELD_TOKENS}"
            )
        if self.max_hop < self.unit or self.max_hop % self.boundary:
            raise ValueError(
                f"the largest hop of {self.max_hop} tokens must be a multiple of {self.boundary} from {self.unit} on"
            )

    @property
    def unit(self) -> int:
        """Hop that later ones are multiples of: `first_hop`, rounded up to the boundary."""
        return math.ceil(self.first_hop / self.boundary) * self.boundary

    def schedule(self, prompt_tokens: int, clock: Callable[[], float] = time.monotonic) -> "HopSchedule":
        """A new stream behind a prompt of that many tokens."""
        if self.strategy == "time_based":
            return TimeBasedSchedule(self, prompt_tokens, clock)
        return HopSchedule(self, prompt_tokens)


class HopSchedule:
    """The cuts of one stream: `exponential` and `equal`."""

    def __init__(self, rules: HopRules, prompt_tokens: int):
        self._rules = rules
        self._chunks = 0
        self._offset = 0
        self._finished = False
        # Stretched to a boundary, which leaves the first chunk no shorter than asked.
        self._first_hop = rules.first_hop + -(prompt_tokens + rules.first_hop) % rules.boundary

    def next_chunk(self, available: int, ended: bool) -> Chunk | None:
        """The next chunk to render, given that the LLM has made `available` tokens and perhaps `ended`.

        None where more tokens are needed, and after the final chunk. Asking says that the chunk before has been sent.
        The final chunk is never empty, since every other one leaves its look-ahead to those after it.
        """
        pending = available - self._offset
        if self._finished or pending == 0:
            return None
        hop = self._first_hop if self._chunks == 0 else self._later_hop(pending - LOOKAHEAD_TOKENS)
        if pending >= hop + LOOKAHEAD_TOKENS:
            chunk = Chunk(self._offset, hop, final=False)
        elif ended:
            chunk = Chunk(self._offset, pending, final=True)
        else:
            return None
        self._chunks += 1
        self._offset = chunk.end
        self._finished = chunk.final
        return chunk

    def _later_hop(self, ready: int) -> int:
        """Hop of a chunk that is not the first, given that `ready` tokens could be rendered now."""
        rules = self._rules
        if rules.strategy == "equal":
            return rules.unit
        # A first hop that was stretched to a boundary is no measure: the doubling then starts behind it.
        doublings = self._chunks if rules.boundary == 1 else self._chunks - 1
        return min(rules.unit << doublings, rules.max_hop)


class TimeBasedSchedule(HopSchedule):
    """Renders what the LLM has ready in whole units, and waits for one more where the listener can.

    The cost of a chunk hardly grows with its size, so the fewest chunks that keep the listener supplied cost least.
    """

    def __init__(self, rules: HopRules, prompt_tokens: int, clock: Callable[[], float]):
        super().__init__(rules, prompt_tokens)
        self._clock = clock
        self._rendering_since: float | None = None
        self._rendering_seconds = 0.0
        self._playing_since: float | None = None
        self._target: int | None = None  # decided once per chunk: one that grows with the backlog is never reached

    def next_chunk(self, available: int, ended: bool) -> Chunk | None:
        now = self._clock()
        if self._rendering_since is not None:
            self._rendering_seconds += now - self._rendering_since
            self._rendering_since = None
        if self._chunks and self._playing_since is None:
            self._playing_since = now
        chunk = super().next_chunk(available, ended)
        if chunk is not None:
            self._rendering_since = now
            self._target = None
        return chunk

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
        """How many chunks could be rendered before the listener has played all audio."""
        assert self._playing_since is not None
        sent_seconds = (self._offset - WITHHELD_TOKENS) / TOKEN_RATE
        buffered_seconds = sent_seconds - (self._clock() - self._playing_since)
        chunk_seconds = self._rendering_seconds / self._chunks
        return buffered_seconds / max(chunk_seconds, 1e-3)
