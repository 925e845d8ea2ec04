"""The threads of a token2wav service that render, each one batch at a time."""

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np

from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.policy.scheduler import CHUNK_WORKER, FIRST_CHUNK_WORKER
from cosyvoice_triton.token2wav.serving.session import Session

SWITCH_SECONDS = 0.0005  # until a thread lets another one run Python: 5 ms would delay first chunks

Work = Callable[[], Sequence[np.ndarray | Exception]]


class RenderedBatch(NamedTuple):
    """What became of a batch: a result for the first request of each session, and the seconds that it took."""

    batch: Sequence[Session]
    results: Sequence[np.ndarray | BaseException]
    seconds: float


class Worker:
    """A thread that renders with one of the engine's workers.

    The service gives it a batch, and takes that back with its results when it is done.
    """

    def __init__(self, number: int, *, on_done: Callable[[], None], clock: Callable[[], float]):
        """Start a worker. number: of the engine's worker. on_done: called from the thread after each batch."""
        self.number = number
        self._on_done = on_done
        self._clock = clock
        self._rendering: Future[RenderedBatch] | None = None
        self._thread = ThreadPoolExecutor(1, f"token2wav-worker-{number}")

    @property
    def idle(self) -> bool:
        """Return whether it can be given a batch."""
        return self._rendering is None

    def call(self, function: Callable[[], object]) -> None:
        """Run a function in the thread and wait for it. Raises what it raises."""
        self._thread.submit(function).result()

    def render(self, batch: Sequence[Session], work: Work) -> None:
        """Begin a batch. An exception of `work` is the result of all its requests."""
        self._rendering = self._thread.submit(self._rendered, batch, work)
        self._rendering.add_done_callback(lambda _: self._on_done())

    def take(self) -> RenderedBatch | None:
        """Return the batch that is done; None if there is none."""
        if self._rendering is None or not self._rendering.done():
            return None
        rendered = self._rendering.result()
        self._rendering = None
        return rendered

    def close(self) -> None:
        """End the thread after what it renders, which may then be taken."""
        self._thread.shutdown()

    def _rendered(self, batch: Sequence[Session], work: Work) -> RenderedBatch:
        begun = self._clock()
        results: Sequence[np.ndarray | BaseException]
        try:
            results = work()
        except (Exception, asyncio.CancelledError) as error:  # one that no batch would survive
            results = [error] * len(batch)
        return RenderedBatch(batch, results, self._clock() - begun)


class Workers:
    """The workers of an engine, in the order in which they choose their batches: that of first chunks first."""

    def __init__(self, engine: Token2Wav, *, on_done: Callable[[], None], clock: Callable[[], float]):
        """See `Worker`."""
        self._engine = engine
        self._workers = [Worker(number, on_done=on_done, clock=clock) for number in range(engine.workers)]

    def __iter__(self) -> Iterator[Worker]:
        return iter(sorted(self._workers, key=lambda worker: worker.number != FIRST_CHUNK_WORKER))

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def can_prefill(self) -> bool:
        """Return whether a voice can be prefilled: that uses the memory of the worker of first chunks, or of the only
        one."""
        return self._workers[-1].idle

    def warm_up(self) -> None:
        """Warm the engine up in each thread, because the GPU libraries cache per thread."""
        if len(self) > 1:
            sys.setswitchinterval(SWITCH_SECONDS)
        for worker in self._workers:
            worker.call(partial(self._engine.warm_up, worker.number))

    def call(self, function: Callable[[], object]) -> None:
        """Run a function in the thread of CHUNK_WORKER and wait for it. Raises what it raises."""
        self._workers[CHUNK_WORKER].call(function)

    def close(self) -> None:
        """End the threads after what they render."""
        for worker in self._workers:
            worker.close()
