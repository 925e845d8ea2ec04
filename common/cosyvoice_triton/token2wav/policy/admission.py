"""Which new listeners a token2wav model admits, so that those it has admitted play without a gap.

Pure policy: no streams, and the time is passed in. Three limits, all learned while the model works:

- capacity: what rendering allows. A batch costs a fixed part, as much as `batch_start_tokens` tokens, and a part for
  each token; the measured seconds are extrapolated to the largest batches that still come in time. This is known before
  the listeners come, so a crowd that arrives within a second is not admitted as a whole.
- rate: starts are spread over the time that a stream lives, because the long chunks of streams that start together
  come due together.
- gaps: while listeners nearly run out of audio, whatever the reason (GPU, LLM, host), new ones wait until they have
  recovered. The limit is lowered to fewer streams than were live then, and grows again while all goes well.

Its numbers are in `profiles.AdmissionNumbers`.
"""

import math
import threading
from collections import deque
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

from cosyvoice_triton.audible import PLAYER_SECONDS
from cosyvoice_triton.errors import OverloadedError
from cosyvoice_triton.monitoring.metrics import GAP_SECONDS, GAPS, LIMIT, LOAD, OPENED, OPENED_WAITED, REFUSED, Values
from cosyvoice_triton.profiles import H200, Profile

Reason = Literal["streams", "capacity", "rate", "gaps", "queue"]


class BatchCosts:
    """What the batches so far cost. Older batches count less."""

    def __init__(self, profile: Profile) -> None:
        self._start_tokens = profile.scheduler.batch_start_tokens
        self._numbers = profile.admission
        self._chunks = self._tokens = self._units = self._speech = self._seconds = 0.0

    def add(self, chunks: int, tokens: int, speech: float, seconds: float) -> None:
        """Add a batch. tokens: computed for the batch, padding included. speech: seconds of audio that it made."""
        kept = self._numbers.memory
        self._chunks, self._tokens = kept * self._chunks + chunks, kept * self._tokens + tokens
        self._units = kept * self._units + self._start_tokens + tokens
        self._speech, self._seconds = kept * self._speech + speech, kept * self._seconds + seconds

    def speech_rate(self, max_tokens: int) -> float:
        """Return how many seconds of speech are rendered per second in batches of `batch_seconds`, with `max_tokens` at
        most and a chunk at least; infinite before the first batch."""
        if not self._speech or not self._seconds:
            return math.inf
        per_token = self._seconds / self._units
        size = min(self._numbers.batch_seconds / per_token - self._start_tokens, max_tokens)
        size = max(size, self._tokens / self._chunks)
        return size / (self._start_tokens + size) / per_token * self._speech / self._tokens


class AdmissionState(NamedTuple):
    """What new listeners are admitted by: a limit of live streams, and whether listeners nearly run out of audio."""

    limit: float
    overloaded: bool


class Admission:
    """The service's thread reports what happens, any thread may ask.

    max_streams: for which there is room. max_tokens: of a batch.
    """

    def __init__(self, max_streams: int, max_tokens: int, now: float, profile: Profile = H200) -> None:
        self._numbers = profile.admission
        self._max_streams = max_streams
        self._max_tokens = max_tokens
        self._costs = BatchCosts(profile)
        self._lock = threading.Lock()
        self._learned = math.inf
        self._lowered = -math.inf
        self._updated = self._refilled = now
        # Of `settle_seconds`: when each chunk came, and whether with too little slack; and how many did.
        self._chunks: deque[tuple[float, bool]] = deque()
        self._tight_chunks = 0
        self._live: deque[tuple[float, int]] = deque()  # when there were the most live streams lately, and how many
        self._awaited, self._paced = 1.0, self._numbers.max_demand  # seconds that chunks' tokens took, and their speech
        averaged = self._numbers.averaged_seconds
        self._seconds, self._other = averaged, 0.0  # and those of the thread that rendered no chunks
        self._live_seconds, self._ended = averaged, averaged / self._numbers.stream_seconds
        self._wholes = self._whole_seconds = 0.0
        self._starts = math.inf  # how many could be admitted at once
        self._state = AdmissionState(math.inf, overloaded=False)
        self._refused = dict.fromkeys(get_args(Reason), 0)
        self._opened, self._opened_waited = 0, 0.0
        self._gaps, self._gap_seconds = 0, 0.0

    # --- what happens ---

    def rendered(self, chunks: int, tokens: int, speech: float, seconds: float) -> None:
        """Count a batch of chunks; see `BatchCosts.add`."""
        self._costs.add(chunks, tokens, speech, seconds)

    def prefilled(self, seconds: float) -> None:
        """Count the seconds in which streams were opened."""
        self._other += seconds

    def rendered_whole(self, seconds: float) -> None:
        """Count a whole utterance."""
        self._other += seconds
        kept = self._numbers.memory
        self._wholes, self._whole_seconds = kept * self._wholes + 1, kept * self._whole_seconds + seconds

    def opened(self, waited: float) -> None:
        """Count a stream that was opened so many seconds after its request."""
        self._opened, self._opened_waited = self._opened + 1, self._opened_waited + waited

    def delivered(self, audio_left: float, awaited: float, speech: float, gap: float, now: float) -> None:
        """Count a later chunk of a stream, which came when its listener had `audio_left`. Its tokens came in `awaited`
        seconds; `gap` is the silence before it."""
        self._gaps, self._gap_seconds = self._gaps + (gap > 0), self._gap_seconds + gap
        tight = audio_left + PLAYER_SECONDS < self._numbers.tight_seconds
        self._chunks.append((now, tight))
        self._tight_chunks += tight
        kept = self._numbers.memory
        self._awaited, self._paced = kept * self._awaited + awaited, kept * self._paced + speech

    def ended(self) -> None:
        """Count a stream that has ended."""
        self._ended += 1

    def update(self, live: int, audio_left: Iterable[float], now: float) -> None:
        """Learn from the last moments. live: streams; audio_left: of their listeners who have heard something."""
        passed, self._updated = max(0.0, min(now - self._updated, self._numbers.averaged_seconds)), now
        overloaded = self._overloaded(audio_left, now)
        peak = self._peak(live, now)
        kept = math.exp(-passed / self._numbers.averaged_seconds)
        self._seconds, self._other = kept * self._seconds + passed, kept * self._other
        if live:
            self._live_seconds, self._ended = kept * self._live_seconds + live * passed, kept * self._ended
        if overloaded and now - self._lowered > self._numbers.settle_seconds:
            self._learned, self._lowered = max(1.0, self._numbers.back_off * min(peak, self._learned)), now
        elif not overloaded:
            self._learned *= 1 + self._numbers.growth * passed * (1 + min(now - self._lowered, 60.0) / 10)
        self._state = AdmissionState(max(1.0, min(self._capacity, self._learned)), overloaded)

    def _overloaded(self, audio_left: Iterable[float], now: float) -> bool:
        """Return whether many listeners nearly run, or ran, out of audio."""
        while self._chunks and self._chunks[0][0] < now - self._numbers.settle_seconds:
            self._tight_chunks -= self._chunks.popleft()[1]
        abandoned, tight = -self._numbers.abandoned_seconds, self._numbers.tight_seconds
        short = self._tight_chunks
        for left in audio_left:
            short += abandoned < left + PLAYER_SECONDS < tight
        return short >= max(self._numbers.tight_chunks, self._numbers.tight_share * len(self._chunks))

    def _peak(self, live: int, now: float) -> int:
        """Return the most live streams of the last `settle_seconds`."""
        while self._live and self._live[0][0] < now - self._numbers.settle_seconds:
            self._live.popleft()
        while self._live and self._live[-1][1] <= live:
            self._live.pop()
        self._live.append((now, live))
        return self._live[0][1]

    @property
    def _pace(self) -> float:
        """Return how many seconds of speech get their tokens in a second, for a stream that waits for nothing else."""
        return self._paced / max(self._awaited, 1e-9)

    @property
    def _capacity(self) -> float:
        """Return how many live streams rendering allows; infinite before the first batch.

        Each counts for a second of speech per second, and more in two cases (docs/results/operations.md). Where tokens
        come little faster than they are heard, each chunk is due soon after its tokens, while chunks of a fast LLM can
        wait; it never counts for more than its tokens make. And few streams fluctuate more than many: two standard
        deviations of their number, as far as `headroom` does not hold them.
        """
        left = max(0.0, 1 - self._other / self._seconds)
        speech = max(left, 1e-9) * self._numbers.headroom * self._costs.speech_rate(self._max_tokens)
        pace = max(self._pace, 1.0)
        few = max(0.0, 2 / math.sqrt(speech) - (1 / self._numbers.headroom - 1))
        return speech / min(pace, self._numbers.max_demand, 1 + (2 / pace) ** 2 + few)

    # --- who is admitted ---

    def ask(self, live: int, now: float) -> OverloadedError | None:
        """Admit a listener, or say why not. live: streams, and listeners who were admitted before and have none yet.

        The first listener of all is always admitted, because no limit is below 1.
        """
        with self._lock:
            limit, overloaded = self._state
            per_second = limit / min(self._numbers.stream_seconds, self._live_seconds / self._ended)
            free = min(self._numbers.max_free_share, self._numbers.free_share * self._pace) * max(0.0, limit - live)
            burst = self._numbers.burst + self._numbers.burst_share * limit + free
            if now > self._refilled:
                self._starts, self._refilled = self._starts + per_second * (now - self._refilled), now
            self._starts = min(burst, self._starts)
            reason = self._reason(live, burst)
            if reason is None:
                self._starts = max(0.0, self._starts - 1)
                return None
            wait = 1 / per_second
            if reason != "rate":
                most = min(limit, self._max_streams)
                wait = (1 + max(0.0, live - most)) * self._live_seconds / (self._ended * most)
            wait += self._numbers.settle_seconds if overloaded else 0.0
        ends = live / self._live_seconds * self._ended
        why = {
            "streams": f"there is room for {self._max_streams}",
            "capacity": f"rendering keeps up with {limit:.0f}",
            "rate": f"{per_second:.3g} can start in a second",
            "gaps": "their audio nearly runs out",
        }[reason]
        return OverloadedError(
            f"listeners: {live}, {ends:.2g} end each second; {why}; try later or on another server", wait, reason
        )

    def _reason(self, live: int, burst: float) -> Reason | None:
        limit, overloaded = self._state
        if live >= self._max_streams:
            return "streams"
        if live + 1 > limit:
            return "gaps" if overloaded else "capacity"
        # Streams that are fewer than a burst may all have started together.
        return "rate" if self._starts < 1 and live + 1 > burst else None

    def ask_whole(self, queued: int) -> OverloadedError | None:
        """Ask the same for a whole utterance, behind that many others: nobody listens yet, so only its wait counts."""
        if not queued or queued < self._max_queued:
            return None
        each = self._whole_seconds / self._wholes
        wait = (queued + 1) * each
        message = f"{queued} whole utterances wait, and each takes {each:.2g} s; try later or on another server"
        return OverloadedError(message, wait - self._numbers.max_whole_seconds, "queue")

    @property
    def _max_queued(self) -> float:
        """Return how many whole utterances may wait; infinite before the first one was rendered."""
        allowed = self._numbers.max_whole_seconds * self._wholes
        return allowed // self._whole_seconds if self._whole_seconds else math.inf

    def count(self, refusal: OverloadedError) -> OverloadedError:
        """Count a refusal that reaches a caller."""
        self._refused[refusal.reason] += 1
        return refusal

    def values(self, live: int = 0, queued: int = 0) -> Values:
        """Return the numbers by metric. live: as for `ask`; queued: whole utterances that wait."""
        limit = min(self._state.limit, self._max_streams)
        load = min(1.0, max(live / limit, queued / max(1, self._max_queued)))
        values = {LIMIT: limit, LOAD: load, OPENED: self._opened, OPENED_WAITED: self._opened_waited}
        values |= {GAPS: self._gaps, GAP_SECONDS: self._gap_seconds}
        return values | {REFUSED.sample(reason=reason): count for reason, count in self._refused.items()}
