"""The threads of a token2wav service that render, each one batch at a time."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.policy.scheduler import FIRST_CHUNK_WORKER
from cosyvoice_triton.token2wav.serving.request_queue import QueuedRequest

SWITCH_SECONDS = 0.0005  # until a thread lets another one run Python: 5 ms would delay first chunks

Work = Callable[[], Sequence[np.ndarray | Exception]]


class RenderedBatch(NamedTuple):
    """What became of a batch: a result for each of its requests, and the seconds that it took."""

    batch: Sequence[QueuedRequest]
    results: Sequence[np.ndarray | Exception]
    seconds: float


class BatchThread:
    """The owner gives it a batch, and takes that back with its results when it is done.

    worker: of the engine, which it renders in. batch: the requests in flight, empty if there are none.
    """

    def __init__(self, worker: int, *, on_done: Callable[[], None], clock: Callable[[], float]):
        """on_done: called from the thread after each batch."""
        self.worker = worker
        self.batch: Sequence[QueuedRequest] = ()
        self._on_done = on_done
        self._clock = clock
        self._rendering: Future[RenderedBatch] | None = None
        self._work: SimpleQueue[tuple[Callable[[], object], Future] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"token2wav-worker-{worker}", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether it can be given a batch."""
        return self._rendering is None

    def call(self, function: Callable[[], object]) -> None:
        """Run a function in the thread and wait for it. Raises what it raises."""
        called: Future = Future()
        self._work.put((function, called))
        called.result()

    def render(self, batch: Sequence[QueuedRequest], work: Work) -> None:
        """Begin a batch. An exception of `work` is the result of all its requests."""
        self.batch, self._rendering = batch, Future()
        self._work.put((lambda: self._rendered(batch, work), self._rendering))

    def take(self) -> RenderedBatch | None:
        """The batch that is done; None if there is none."""
        if self._rendering is None or not self._rendering.done():
            return None
        rendered = self._rendering.result()
        self.batch, self._rendering = (), None
        return rendered

    def close(self) -> None:
        """End the thread after what it renders, which may then be taken."""
        self._work.put(None)
        self._thread.join()

    def _rendered(self, batch: Sequence[QueuedRequest], work: Work) -> RenderedBatch:
        begun = self._clock()
        results: Sequence[np.ndarray | Exception]
        try:
            results = work()
        except Exception as error:  # one that no batch would survive
            results = [error] * len(batch)
        return RenderedBatch(batch, results, self._clock() - begun)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            _call(*item)
            del item  # so that an idle thread keeps no batch alive
            self._on_done()


def _call(function: Callable[[], object], done: Future) -> None:
    try:
        done.set_result(function())
    except BaseException as error:
        done.set_exception(error)


class BatchThreads:
    """Those of an engine's workers, in the order in which they choose their batches: that of first chunks first."""

    def __init__(self, engine: Token2Wav, *, on_done: Callable[[], None], clock: Callable[[], float]):
        """See `BatchThread`."""
        self._engine = engine
        self._threads = {worker: BatchThread(worker, on_done=on_done, clock=clock) for worker in range(engine.workers)}

    def __iter__(self) -> Iterator[BatchThread]:
        return iter(sorted(self._threads.values(), key=lambda thread: thread.worker != FIRST_CHUNK_WORKER))

    @property
    def prefills(self) -> bool:
        """Whether a voice can be prefilled: that uses the memory of first chunks."""
        return self._threads.get(FIRST_CHUNK_WORKER, self._threads[0]).idle

    @property
    def in_flight(self) -> list[QueuedRequest]:
        """The requests of the batches that are rendered."""
        return [queued for thread in self._threads.values() for queued in thread.batch]

    @property
    def streams(self) -> set[str]:
        """The streams of these."""
        return {queued.stream_id for queued in self.in_flight}

    def warm_up(self) -> None:
        """In each thread, because the GPU libraries cache per thread."""
        if self._engine.workers > 1:
            sys.setswitchinterval(SWITCH_SECONDS)
        for thread in self._threads.values():
            thread.call(partial(self._engine.warm_up, thread.worker))

    def call(self, function: Callable[[], object]) -> None:
        """In the thread of worker 0: see `BatchThread.call`."""
        self._threads[0].call(function)

    def close(self) -> None:
        for thread in self._threads.values():
            thread.close()
