"""Which new listeners a token2wav model admits, so that those it has admitted play without a gap.

Pure policy: no streams, and the time is passed in. Three limits, all learned while the model works:

- capacity: what rendering allows. The seconds of a batch are fitted to its tokens, as a fixed part and a part for each
  token, and extrapolated to the largest batches that still come in time. This is known before the listeners come, so a
  crowd that arrives within a second is not admitted as a whole.
- rate: starts are spread over the time that a stream lives, because the long chunks of streams that start together
  come due together.
- gaps: while listeners nearly run out of audio, whatever the reason (GPU, LLM, host), new ones wait until they have
  recovered. The limit is lowered to fewer streams than were live then, and grows again while all goes well.

The numbers below were chosen by simulation (tests/token2wav/test_admission.py) with the batch costs of an H200.
"""

import math
import threading
from collections import deque
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

from cosyvoice_triton.config import AdmissionName, Token2WavConfig
from cosyvoice_triton.errors import OverloadedError
from cosyvoice_triton.monitoring.metrics import GAP_SECONDS, GAPS, LIMIT, OPENED, OPENED_WAITED, REFUSED, Values
from cosyvoice_triton.playback import PLAYER_SECONDS
from cosyvoice_triton.token2wav.policy.scheduler import START_TOKENS

Reason = Literal["streams", "capacity", "rate", "gaps", "queue"]

BATCH_SECONDS = 0.1  # a chunk waits for one batch and is rendered in the next: both fit into a player's buffer
HEADROOM = 0.72  # of what the fitted costs allow: arrivals are random, and batches mix lengths
MEMORY = 0.98  # weight of the batches, or chunks, so far when another comes
SPREAD_TOKENS = 30.0  # if the tokens of the batches differ less than this, START_TOKENS decides the fixed part
MAX_DEMAND = 1.7  # of a live stream, seconds of speech per second
STREAM_SECONDS = 4.0  # how long a stream is taken to live until streams have ended, and at most
# Starts at once: BURST, a share of the limit, and one of what is free, the more the faster the tokens come.
BURST, BURST_SHARE, FREE_SHARE, MAX_FREE_SHARE = 2, 0.025, 0.03, 0.2
TIGHT_SECONDS = 0.09  # a chunk that leaves less of the player's buffer nearly came too late
TIGHT_CHUNKS, TIGHT_SHARE = 3, 0.05  # of those of WINDOW_SECONDS: fewer are no overload
WINDOW_SECONDS = 2.0
SETTLE_SECONDS = 2.0  # until a change of the limit shows in the listeners' audio
ABANDONED_SECONDS = 5.0  # a listener without audio for this long has been left by the sender
BACK_OFF = 0.85  # of the streams that were too many
CLOSED_SHARE = 0.85  # of the limit: with fewer streams than that, new ones are admitted while others recover
GROWTH = 0.02  # of a lowered limit per second, more each second
AVERAGED_SECONDS = 10.0
MAX_WHOLE_SECONDS = 5.0  # of rendering in the queue of whole utterances


class BatchCosts:
    """Fits the seconds of a batch to its tokens. Older batches count less."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(("batches", "chunks", "tokens", "speech", "seconds", "squares", "products"), 0.0)

    def add(self, chunks: int, tokens: int, speech: float, seconds: float) -> None:
        """tokens: computed for the batch, padding included. speech: seconds of audio that it made."""
        added = (1, chunks, tokens, speech, seconds, tokens * tokens, tokens * seconds)
        for name, value in zip(self._sums, added, strict=True):
            self._sums[name] = MEMORY * self._sums[name] + value

    def speech_rate(self, max_tokens: int) -> float:
        """Seconds of speech per second in batches of BATCH_SECONDS, with `max_tokens` at most and a chunk at least."""
        batches, chunks, tokens, speech, seconds, squares, products = self._sums.values()
        if not speech or not seconds:
            return math.inf
        mean = tokens / batches
        variance = squares / batches - mean**2
        covariance = (products - mean * seconds) / batches
        usual = seconds / (START_TOKENS * batches + tokens)
        per_token = (covariance + SPREAD_TOKENS**2 * usual) / (variance + SPREAD_TOKENS**2)
        per_token = min(max(per_token, 1e-9), seconds / tokens)
        fixed = seconds / batches - per_token * mean
        size = max(min((BATCH_SECONDS - fixed) / per_token, max_tokens), tokens / chunks)
        return size / (fixed + per_token * size) * speech / tokens


class State(NamedTuple):
    """What new listeners are admitted by: a limit of live streams, and whether listeners nearly run out of audio."""

    limit: float
    overloaded: bool


class Admission:
    """The service's thread reports what happens, any thread may ask.

    max_streams: for which there is room. max_tokens: of a batch. by: "count": `max_streams` is the only limit.
    """

    def __init__(
        self, max_streams: int, max_tokens: int, now: float, by: AdmissionName = Token2WavConfig.admission
    ) -> None:
        self._by = by
        self._max_streams = max_streams
        self._max_tokens = max_tokens
        self._costs = BatchCosts()
        self._lock = threading.Lock()
        self._learned = math.inf
        self._lowered = -math.inf
        self._updated = self._refilled = now
        self._chunks: deque[tuple[float, bool]] = deque()  # of the window: when each came, and whether too narrowly
        self._live: deque[tuple[float, int]] = deque()  # the highest numbers of live streams of SETTLE_SECONDS
        self._awaited, self._paced = 1.0, MAX_DEMAND  # seconds that chunks' tokens took, and their speech
        self._seconds, self._other = AVERAGED_SECONDS, 0.0  # and those of the thread that rendered no chunks
        self._live_seconds, self._ended = AVERAGED_SECONDS, AVERAGED_SECONDS / STREAM_SECONDS
        self._wholes = self._whole_seconds = 0.0
        self._starts = math.inf  # how many could be admitted at once
        self._state = State(math.inf, overloaded=False)
        self._refused = dict.fromkeys(get_args(Reason), 0)
        self._opened, self._opened_waited = 0, 0.0
        self._gaps, self._gap_seconds = 0, 0.0

    # --- what happens ---

    def rendered(self, chunks: int, tokens: int, speech: float, seconds: float) -> None:
        """A batch of chunks; see `BatchCosts.add`."""
        self._costs.add(chunks, tokens, speech, seconds)

    def prefilled(self, seconds: float) -> None:
        self._other += seconds

    def rendered_whole(self, seconds: float) -> None:
        """A whole utterance."""
        self._other += seconds
        self._wholes, self._whole_seconds = MEMORY * self._wholes + 1, MEMORY * self._whole_seconds + seconds

    def opened(self, waited: float) -> None:
        """A stream, this many seconds after its request."""
        self._opened, self._opened_waited = self._opened + 1, self._opened_waited + waited

    def delivered(self, audio_left: float, awaited: float, speech: float, gap: float, now: float) -> None:
        """A later chunk of a stream, when its listener had `audio_left`. Its tokens came in `awaited` seconds; `gap`:
        silence before it."""
        self._gaps, self._gap_seconds = self._gaps + (gap > 0), self._gap_seconds + gap
        narrow = audio_left + PLAYER_SECONDS < TIGHT_SECONDS
        self._chunks.append((now, narrow))
        self._awaited, self._paced = MEMORY * self._awaited + awaited, MEMORY * self._paced + speech

    def ended(self) -> None:
        """A stream."""
        self._ended += 1

    def update(self, live: int, audio_left: Iterable[float], now: float) -> None:
        """Learn from the last moments. live: streams; audio_left: of their listeners who have heard something."""
        passed, self._updated = max(0.0, min(now - self._updated, AVERAGED_SECONDS)), now
        overloaded = self._narrow(audio_left, now)
        peak = self._peak(live, now)
        self._average(live, passed)
        if overloaded and now - self._lowered > SETTLE_SECONDS:
            self._learned, self._lowered = max(1.0, BACK_OFF * min(peak, self._learned)), now
        elif not overloaded:
            self._learned *= 1 + GROWTH * passed * (1 + min(now - self._lowered, 60.0) / 10)
        if self._by == "measured":
            self._state = State(max(1.0, min(self._capacity, self._learned)), overloaded)

    def _narrow(self, audio_left: Iterable[float], now: float) -> bool:
        """Whether many listeners nearly run, or ran, out of audio."""
        while self._chunks and self._chunks[0][0] < now - WINDOW_SECONDS:
            self._chunks.popleft()
        late = sum(-ABANDONED_SECONDS < left + PLAYER_SECONDS < TIGHT_SECONDS for left in audio_left)
        late += sum(narrow for _, narrow in self._chunks)
        return late >= max(TIGHT_CHUNKS, TIGHT_SHARE * len(self._chunks))

    def _peak(self, live: int, now: float) -> int:
        """The most live streams of the last SETTLE_SECONDS."""
        while self._live and self._live[0][0] < now - SETTLE_SECONDS:
            self._live.popleft()
        while self._live and self._live[-1][1] <= live:
            self._live.pop()
        self._live.append((now, live))
        return self._live[0][1]

    def _average(self, live: int, passed: float) -> None:
        kept = math.exp(-passed / AVERAGED_SECONDS)
        self._seconds, self._other = kept * self._seconds + passed, kept * self._other
        if live:
            self._live_seconds, self._ended = kept * self._live_seconds + live * passed, kept * self._ended

    @property
    def _pace(self) -> float:
        """Seconds of speech whose tokens come in a second, for a stream that waits for nothing else."""
        return self._paced / max(self._awaited, 1e-9)

    @property
    def _capacity(self) -> float:
        """Live streams that rendering allows; infinite before the first batch.

        Each counts for a second of speech per second, and more in two cases (docs/results/operations.md). Where tokens
        come little faster than they are heard, each chunk is due soon after its tokens, while chunks of a fast LLM can
        wait; it never counts for more than its tokens make. And few streams fluctuate more than many: two standard
        deviations of their number, as far as HEADROOM does not hold them.
        """
        left = max(0.0, 1 - self._other / self._seconds)
        speech = max(left, 1e-9) * HEADROOM * self._costs.speech_rate(self._max_tokens)
        pace = max(self._pace, 1.0)
        few = max(0.0, 2 / math.sqrt(speech) - (1 / HEADROOM - 1))
        return speech / min(pace, MAX_DEMAND, 1 + (2 / pace) ** 2 + few)

    # --- who is admitted ---

    def ask(self, live: int, ahead: int, now: float) -> OverloadedError | None:
        """Admit a listener, or say why not. live: streams and those admitted before; ahead: who waits before them.

        The first listener of all is always admitted, because no limit is below 1.
        """
        with self._lock:
            limit, overloaded = self._state
            per_second = limit / min(STREAM_SECONDS, self._live_seconds / self._ended)
            free = min(MAX_FREE_SHARE, FREE_SHARE * self._pace) * max(0.0, limit - live)
            burst = BURST + BURST_SHARE * limit + free
            if now > self._refilled:
                self._starts, self._refilled = self._starts + per_second * (now - self._refilled), now
            self._starts = min(burst, self._starts)
            reason = self._reason(live, ahead, burst)
            if reason is None:
                self._starts = max(0.0, self._starts - 1)
                return None
            wait = (ahead + 1) / per_second
            if reason != "rate":
                most = min(limit, self._max_streams)
                wait = (ahead + 1 + max(0.0, live - most)) * self._live_seconds / (self._ended * most)
            wait += SETTLE_SECONDS if overloaded else 0.0
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

    def _reason(self, live: int, ahead: int, burst: float) -> Reason | None:
        limit, overloaded = self._state
        if live >= self._max_streams:
            return "streams"
        if overloaded and live > CLOSED_SHARE * limit:
            return "gaps"
        if live + 1 > limit:
            return "capacity"
        # Streams that are fewer than a burst may all have started together.
        return "rate" if ahead or (self._starts < 1 and live + 1 > burst) else None

    def ask_whole(self, queued: int) -> OverloadedError | None:
        """The same for a whole utterance, behind that many others: nobody listens yet, so only its wait counts."""
        each = self._whole_seconds / self._wholes if self._wholes else 0.0
        if not queued or (queued + 1) * each <= MAX_WHOLE_SECONDS:
            return None
        wait = (queued + 1) * each
        message = f"{queued} whole utterances wait, and each takes {each:.2g} s; try later or on another server"
        return OverloadedError(message, wait - MAX_WHOLE_SECONDS, "queue")

    def count(self, refusal: OverloadedError) -> OverloadedError:
        """Count a refusal that reaches a caller."""
        self._refused[refusal.reason] += 1
        return refusal

    def values(self) -> Values:
        """The numbers by metric."""
        limit = min(self._state.limit, self._max_streams)
        values = {LIMIT: limit, OPENED: self._opened, OPENED_WAITED: self._opened_waited}
        values |= {GAPS: self._gaps, GAP_SECONDS: self._gap_seconds}
        return values | {REFUSED.sample(reason=reason): count for reason, count in self._refused.items()}
