"""Streams that start at random times and are fed at twice real time, through the real service."""

import heapq
import itertools
import queue
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, SAMPLE_RATE, TOKEN_RATE
from cosyvoice_triton.errors import OverloadedError
from cosyvoice_triton.load.measure import Player
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.serving.requests import Token2WavRequest
from cosyvoice_triton.token2wav.serving.service import Stats, Token2WavService
from cosyvoice_triton.voice.prompt import Prompt

FEED_RATE = 2 * TOKEN_RATE  # tokens per second


class Piece(NamedTuple):
    """The tokens of a chunk, before its stream is known."""

    tokens: np.ndarray
    final: bool


@dataclass
class Listener:
    """One stream, its tokens and its playback. Times are seconds of one clock."""

    begins: float
    chunks: list[Piece]
    ready: list[float]  # when the tokens of each chunk have arrived
    requested_at: float = 0.0
    next: int = -1  # the requested chunk; -1 is the start of the stream
    latencies: list[float] = field(default_factory=list)
    player: Player = field(default_factory=Player)
    error: str = ""
    refused_after: float | None = None

    @property
    def done(self) -> bool:
        return bool(self.error) or self.refused_after is not None or self.next == len(self.chunks)

    def receive(self, now: float, answer: Any) -> None:
        if isinstance(answer, OverloadedError):
            self.refused_after = now - self.requested_at
            return
        if isinstance(answer, BaseException):
            self.error = repr(answer)
            return
        if self.next >= 0:
            self.latencies.append(now - self.requested_at)
            self.player.add(now, len(answer) / SAMPLE_RATE)
        self.next += 1


@dataclass(frozen=True)
class LoadResult:
    listeners: list[Listener]
    window: float
    stats: Stats

    def summary(self) -> dict[str, float]:
        """Return the figures. `errors`, the times and `share_without_gap` are of the listeners who were admitted."""
        first = [1e3 * listener.latencies[0] for listener in self.listeners if listener.latencies]
        later = [1e3 * latency for listener in self.listeners for latency in listener.latencies[1:]]
        refusals = [x.refused_after for x in self.listeners if x.refused_after is not None]
        admitted = [x for x in self.listeners if x.refused_after is None]
        gaps = [listener.player.worst_gap for listener in admitted if not listener.error]
        times = 1e3 * np.percentile(refusals or [0.0], (50, 95, 100))
        return {
            "refused": len(refusals),
            **dict(zip(("refusal_p50_ms", "refusal_p95_ms", "refusal_max_ms"), times.tolist(), strict=True)),
            "utterances": len(self.listeners),
            "window_seconds": self.window,
            "errors": sum(bool(listener.error) for listener in self.listeners),
            "first_chunk_p50_ms": float(np.percentile(first, 50)),
            "first_chunk_p95_ms": float(np.percentile(first, 95)),
            "later_chunk_p50_ms": float(np.percentile(later, 50)),
            "later_chunk_p95_ms": float(np.percentile(later, 95)),
            "share_without_gap": sum(gap <= 0 for gap in gaps) / len(admitted),
            "worst_gap_ms": 1e3 * max(gaps),
            "least_slack_p5_ms": 1e3 * float(np.percentile([x.player.least_slack for x in admitted], 5)),
            "mean_batch": self.stats.chunks / max(self.stats.batches, 1),
            "mean_wait_ms": 1e3 * self.stats.waited_seconds / max(self.stats.chunks, 1),
        }

    def line(self) -> str:
        s = self.summary()
        first = f"first chunk p50 {s['first_chunk_p50_ms']:.1f}, p95 {s['first_chunk_p95_ms']:.1f} ms"
        return (
            f"{s['utterances']:3.0f} utterances within {self.window:.3g} s: {first}; "
            f"later p95 {s['later_chunk_p95_ms']:.1f} ms; without a gap {100 * s['share_without_gap']:.1f} %, "
            f"worst {s['worst_gap_ms']:.0f} ms; least slack p5 {s['least_slack_p5_ms']:.0f} ms; "
            f"errors {s['errors']:.0f}; refused {s['refused']:.0f} after p50 {s['refusal_p50_ms']:.2f}, "
            f"p95 {s['refusal_p95_ms']:.2f}, max {s['refusal_max_ms']:.2f} ms; mean batch {s['mean_batch']:.1f}"
        )


def run_load(
    engine: Token2Wav,
    utterances: Sequence[list[Piece]],
    voices: Sequence[Prompt],
    *,
    hops: Sequence[int],
    tokens: int,
    window: float,
) -> LoadResult:
    """Render every utterance of `tokens` tokens in `hops` with its voice; they start within `window` seconds."""
    for prompt in voices:  # fill the prompt caches before timing
        engine.close(engine.open(prompt))
    service = Token2WavService(engine, idle_seconds=600)
    rng, begun = random.Random(0), time.perf_counter() + 0.2
    listeners = []
    for chunks in utterances:
        begins = begun + rng.random() * window
        needs = [end + LOOKAHEAD_TOKENS for end in itertools.accumulate(hops)][: len(chunks) - 1]
        listeners.append(Listener(begins, chunks, [begins + need / FEED_RATE for need in [*needs, tokens]]))
    answers: queue.Queue[tuple[float, int, Any]] = queue.Queue()
    due = [(listener.begins, index) for index, listener in enumerate(listeners)]
    heapq.heapify(due)
    live = len(listeners)
    while live:
        wait = max(0.0, due[0][0] - time.perf_counter()) if due else None
        try:
            now, index, answer = answers.get(timeout=wait)
            listener = listeners[index]
            listener.receive(now, answer)
            if listener.done:
                live -= 1
            else:
                heapq.heappush(due, (max(now, listener.ready[listener.next]), index))
        except queue.Empty:
            pass
        while due and due[0][0] <= time.perf_counter():
            _submit_next(service, listeners, voices, heapq.heappop(due)[1], answers)
    stats = service.stats()
    service.close()
    return LoadResult(listeners, window, stats)


def _submit_next(
    service: Token2WavService,
    listeners: list[Listener],
    voices: Sequence[Prompt],
    index: int,
    answers: "queue.Queue[tuple[float, int, Any]]",
) -> None:
    listener = listeners[index]
    if listener.next < 0:
        nothing = np.zeros(0, np.int64)
        request = Token2WavRequest(f"sequence {index + 1}", start=True, end=False, tokens=nothing, prompt=voices[index])
    else:
        chunk = listener.chunks[listener.next]
        request = Token2WavRequest(
            f"sequence {index + 1}", start=False, end=chunk.final, tokens=chunk.tokens, final=chunk.final
        )
    listener.requested_at = time.perf_counter()
    try:
        service.submit(request, lambda answer: answers.put((time.perf_counter(), index, answer)))
    except OverloadedError as error:
        answers.put((time.perf_counter(), index, error))
