"""The threads of a token2wav service that render."""

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.policy.admission import Admission
from cosyvoice_triton.token2wav.serving.session import Session

SWITCH_SECONDS = 0.0005  # until a thread lets another one run Python: 5 ms would delay first chunks
MEASURED_CHUNKS = (1, 8)  # of the batches that are rendered before the first listener comes

# Renders a batch. Calls what it is given when another batch may be prepared behind it.
Work = Callable[[Callable[[], None]], Sequence[np.ndarray | Exception]]


class RenderedBatch(NamedTuple):
    """What became of a batch: a result for the first request of each session, and the seconds that it took."""

    batch: Sequence[Session]
    results: Sequence[np.ndarray | BaseException]
    seconds: float


@dataclass(eq=False)
class Worker:
    """Threads that render with one of the engine's workers.

    The service gives it a batch, and takes that back with its results when it is done. A worker of two threads is given
    the next batch when most of the one before is done, so that the GPU need not wait between them.

    number: of the engine's worker. on_change: called from a thread after each batch, and when another one can be given.
    max_chunks: of a batch.
    """

    number: int
    on_change: Callable[[], None]
    clock: Callable[[], float]
    max_chunks: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        self._rendering: list[Future[RenderedBatch]] = []
        self._nearly_done = False  # the batch that was given last
        self._ended_at = -math.inf  # the batch before
        self._threads = [ThreadPoolExecutor(1, f"token2wav-worker-{self.number}") for _ in range(self.threads)]

    @property
    def idle(self) -> bool:
        """Return whether it can be given a batch."""
        return not self._rendering or (self._nearly_done and len(self._rendering) < len(self._threads))

    def call(self, function: Callable[[], object]) -> None:
        """Run a function in each thread, one after the other. Raises what it raises."""
        for thread in self._threads:
            thread.submit(function).result()

    def render(self, batch: Sequence[Session], work: Work) -> None:
        """Begin a batch. An exception of `work` is the result of all its requests."""
        self._nearly_done = False
        thread = self._threads.pop(0)  # the other one may still render
        self._threads.append(thread)
        self._rendering.append(thread.submit(self._rendered, batch, work))
        self._rendering[-1].add_done_callback(lambda _: self.on_change())

    def take(self) -> RenderedBatch | None:
        """Return a batch that is done; None if there is none."""
        done = next((index for index, each in enumerate(self._rendering) if each.done()), None)
        return None if done is None else self._rendering.pop(done).result()

    def close(self) -> None:
        """End the threads after what they render, which may then be taken."""
        for thread in self._threads:
            thread.shutdown()

    def _go_on(self) -> None:
        self._nearly_done = True
        self.on_change()

    def _rendered(self, batch: Sequence[Session], work: Work) -> RenderedBatch:
        begun = self.clock()
        results: Sequence[np.ndarray | BaseException]
        try:
            results = work(self._go_on)
        except (Exception, asyncio.CancelledError) as error:  # one that no batch would survive
            results = [error] * len(batch)
        begun, self._ended_at = max(begun, self._ended_at), self.clock()  # it may have waited for the one before
        return RenderedBatch(batch, results, self._ended_at - begun)


def measure(engine: Token2Wav, admission: Admission, clock: Callable[[], float]) -> None:
    """Render first chunks, one alone and several together, so that admission knows what they cost. Raises what that
    raises."""
    prompt, tokens = engine.sample(engine.limits.first_hop_tokens)
    for warm in (False, True):  # the first batch of a size takes longer
        for size in MEASURED_CHUNKS:
            streams = [engine.open(prompt) for _ in range(min(size, engine.limits.max_streams))]
            try:
                chunks, begun = [engine.chunk(stream, tokens, final=True) for stream in streams], clock()
                results = engine.render(chunks)
                if warm:
                    samples = sum(len(result) for result in results if not isinstance(result, Exception))
                    computed = engine.padded(len(chunks), chunks[0].computed)
                    admission.rendered(len(chunks), computed, samples / SAMPLE_RATE, clock() - begun)
            finally:
                for stream in streams:
                    engine.close(stream)
