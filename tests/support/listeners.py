"""Listeners in front of a token2wav as fast as the one measured on an H200 (docs/results/speed.md).

Events in the order of their time; no clock is read. The scheduler and, if given, the admission are the real ones. Two
workers share the GPU evenly while both render.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cosyvoice_triton.audible import Playback
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, TOKEN_RATE
from cosyvoice_triton.profiles import H200
from cosyvoice_triton.token2wav.gpu.limits import DIT_FRAMES, BatchLimits, padding
from cosyvoice_triton.token2wav.policy.admission import Admission
from cosyvoice_triton.token2wav.policy.scheduler import CHUNK_WORKER, FIRST_CHUNK_WORKER, Candidate, ChunkScheduler

HOPS = (15, 25, 50, 100, 22)
UTTERANCE_SECONDS = sum(HOPS) / TOKEN_RATE
WITHHELD = 4  # tokens of the first chunk that are played with the last
LIMITS = [BatchLimits(max_streams=400).of_worker(worker) for worker in (CHUNK_WORKER, FIRST_CHUNK_WORKER)]
PADDED, FIRST_PADDED = (padding(limits.sizes(limits.chunk_frames, DIT_FRAMES)) for limits in LIMITS)


def arrivals(listeners: float, seconds: float, seed: int = 0) -> list[float]:
    """Random times at which so many listeners on average hear an utterance at any moment."""
    generator, times, now = random.Random(seed), [], 0.0
    while (now := now + generator.expovariate(listeners / UTTERANCE_SECONDS)) < seconds:
        times.append(now)
    return times


def batch_seconds(tokens: int) -> float:
    """Of the DiT stack on an H200."""
    return 0.012 + 42e-6 * tokens


@dataclass
class Batch:
    """What a worker renders: the streams, their padded tokens, and the seconds of the GPU that it still takes."""

    streams: list[int]
    padded: int
    begun: float
    left: float


class Listeners:
    """Each begins at its time in `begins` and hears one utterance, unless admission refuses it.

    token_rate: of each stream's LLM. llm_rate: of all together, divided evenly; None: no limit. cost: seconds of a
    batch, from its padded tokens and the time. workers: 2 if first chunks have a worker of their own.
    """

    def __init__(
        self,
        begins: Sequence[float],
        token_rate: float,
        cost: Callable[[int, float], float] = lambda tokens, now: batch_seconds(tokens),
        admission: Admission | None = None,
        llm_rate: float | None = None,
        workers: int = 1,
        scheduler: ChunkScheduler | None = None,
    ) -> None:
        self.begins: list[float] = []
        self._rate, self._cost = token_rate, cost
        self._admission, self._llm_rate = admission, llm_rate
        self._order = itertools.count()
        self._events: list[tuple[float, int, str, int]] = []
        self._queue: list[tuple[int, int]] = []  # stream and number of arrival
        self._scheduler, self._workers = scheduler or ChunkScheduler(), workers
        self._batches: dict[int, Batch] = {}  # by worker
        self._progressed = 0.0  # when their `left` was true
        self._plan = 0  # the number of the event that ends the next batch; earlier ones are out of date
        self._chunk: list[int] = []
        self._tokens: list[float] = []
        self._playback: list[Playback] = []
        self._requested: list[float] = []
        self._answered: list[float] = []
        self._awaiting: dict[int, int] = {}  # streams that wait for the LLM: for how many tokens
        self.live: set[int] = set()
        self.admitted: list[int] = []
        self.refused: list[int] = []
        self.first: dict[int, float] = {}  # latencies of first chunks
        self.gaps: list[float] = []  # the longest of each
        for at in begins:
            self.add(at)
        if llm_rate:
            self._at(0.0, "llm", -1)

    def add(self, at: float) -> None:
        """A listener who begins then."""
        self._at(at, "begin", len(self.begins))
        self.begins.append(at)
        self._playback.append(Playback())
        self._chunk.append(0)
        for numbers in (self._tokens, self._requested, self._answered, self.gaps):
            numbers.append(0.0)

    def simulate(self, seconds: float) -> "Listeners":
        """Until then; it may be called again."""
        while self._events and self._events[0][0] <= seconds:
            now, _, event, stream = heapq.heappop(self._events)
            getattr(self, f"_{event}")(now, stream)
            self._render(now)
        return self

    def without_gap(self) -> float:
        """Share of those who were admitted."""
        return sum(self.gaps[stream] <= 0 for stream in self.admitted) / len(self.admitted)

    def _begin(self, now: float, stream: int) -> None:
        if self._admission:
            self._learn(now)
            if self._admission.ask(len(self.live), now):
                self.refused.append(stream)
                return
        self.live.add(stream)
        self.admitted.append(stream)
        self._await_tokens(now, stream)

    def _llm(self, now: float, _: int) -> None:
        assert self._llm_rate
        busy = [stream for stream in self.live if self._tokens[stream] < sum(HOPS)]
        for stream in busy:
            self._tokens[stream] += 0.02 * min(self._rate, self._llm_rate / len(busy))
        for stream in [each for each, needed in self._awaiting.items() if self._tokens[each] >= needed]:
            del self._awaiting[stream]
            self._at(now, "request", stream)
        self._at(now + 0.02, "llm", -1)

    def _request(self, now: float, stream: int) -> None:
        self._requested[stream] = now
        self._queue.append((stream, next(self._order)))

    def _render(self, now: float) -> None:
        """Give the idle workers their batches."""
        begun = False
        for worker in (FIRST_CHUNK_WORKER, CHUNK_WORKER) if self._workers == 2 else (CHUNK_WORKER,):
            if worker in self._batches or not self._queue:
                continue
            waiting = [self._candidate(each, at, now) for each, at in self._queue]
            if takes := self._scheduler.worker_takes(worker, self._workers, waiting):
                self._start_batch(now, worker, waiting, takes)
                begun = True
            elif worker == FIRST_CHUNK_WORKER and (wait := self._scheduler.gathers(waiting)):
                self._at(now + wait + 1e-6, "look", -1)
        if begun:
            self._plan_end(now)

    def _look(self, now: float, _: int) -> None:
        """First chunks have waited long enough for others."""

    def _candidate(self, stream: int, at: int, now: float) -> Candidate:
        left = self._playback[stream].left(now)
        first = self._workers == 2 and left is None
        return Candidate(left, at, self._size(stream), first, now - self._requested[stream])

    def _start_batch(self, now: float, worker: int, waiting: list[Candidate], takes: list[int]) -> None:
        padded = FIRST_PADDED if worker == FIRST_CHUNK_WORKER else PADDED
        picked = self._scheduler.pick(
            [waiting[index] for index in takes],
            LIMITS[worker].max_chunks,
            H200.limits.dit_batch_tokens,
            padded,
            waited_for=self._workers == 1,
        )
        streams = [self._queue[takes[index]][0] for index in picked]
        self._queue = [each for each in self._queue if each[0] not in streams]
        tokens = padded(len(streams), max(map(self._size, streams)))
        self._progress(now)
        self._batches[worker] = Batch(streams, tokens, now, self._cost(tokens, now))

    def _progress(self, now: float) -> None:
        for batch in self._batches.values():
            batch.left -= (now - self._progressed) / len(self._batches)
        self._progressed = now

    def _plan_end(self, now: float) -> None:
        self._plan = next(self._order)
        if self._batches:
            left = min(batch.left for batch in self._batches.values()) * len(self._batches)
            self._at(now + max(0.0, left), "done", self._plan)

    def _done(self, now: float, plan: int) -> None:
        if plan != self._plan:
            return
        self._progress(now)
        for worker in [worker for worker, batch in self._batches.items() if batch.left < 1e-9]:
            batch = self._batches.pop(worker)
            seconds = [self._receive(now, stream) for stream in batch.streams]
            if self._admission and worker == CHUNK_WORKER:
                self._admission.rendered(len(batch.streams), batch.padded, sum(seconds), now - batch.begun)
        if self._admission:
            self._learn(now)
        self._plan_end(now)

    def _receive(self, now: float, stream: int) -> float:
        number, playback = self._chunk[stream], self._playback[stream]
        final = number == len(HOPS) - 1
        seconds = (HOPS[number] - WITHHELD * (number == 0) + WITHHELD * final) / TOKEN_RATE
        left, gap = playback.left(now), playback.add(seconds, now)
        self.gaps[stream] = max(self.gaps[stream], gap)
        if left is None:
            self.first[stream] = now - self._requested[stream]
        elif self._admission:
            self._admission.delivered(left, self._requested[stream] - self._answered[stream], seconds, gap, now)
        self._answered[stream] = now
        self._chunk[stream] += 1
        if not final:
            self._await_tokens(now, stream)
            return seconds
        self.live.discard(stream)
        if self._admission:
            self._admission.ended()
        return seconds

    def _await_tokens(self, now: float, stream: int) -> None:
        ahead = LOOKAHEAD_TOKENS if self._chunk[stream] < len(HOPS) - 1 else 0
        needed = sum(HOPS[: self._chunk[stream] + 1]) + ahead
        if self._llm_rate:
            self._awaiting[stream] = needed
        else:
            self._at(max(now, self.begins[stream] + needed / self._rate), "request", stream)

    def _size(self, stream: int) -> int:
        return HOPS[self._chunk[stream]]

    def _learn(self, now: float) -> None:
        assert self._admission
        left = [self._playback[stream].left(now) for stream in self.live]
        self._admission.update(len(self.live), [each for each in left if each is not None], now)

    def _at(self, time: float, event: str, stream: int) -> None:
        heapq.heappush(self._events, (time, next(self._order), event, stream))
