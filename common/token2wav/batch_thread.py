"""A thread of a token2wav service that renders one batch at a time."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from common.token2wav.request_queue import QueuedRequest

Work = Callable[[], Sequence[np.ndarray | Exception]]


class Rendered(NamedTuple):
    """What became of a batch: a result for each of its requests, and the seconds that it took."""

    batch: Sequence[QueuedRequest]
    results: Sequence[np.ndarray | Exception]
    seconds: float


class BatchThread:
    """The owner gives it a batch, and takes that back with its results when it is done.

    starts: whether it renders first chunks apart from other batches. batch: the requests in flight, empty if there are
    none.
    """

    def __init__(self, name: str, *, starts: bool, on_done: Callable[[], None], clock: Callable[[], float]):
        """on_done: called from the thread after each batch."""
        self.starts = starts
        self.batch: Sequence[QueuedRequest] = ()
        self._on_done = on_done
        self._clock = clock
        self._rendering: Future[Rendered] | None = None
        self._work: SimpleQueue[tuple[Callable[[], object], Future] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
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

    def take(self) -> Rendered | None:
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

    def _rendered(self, batch: Sequence[QueuedRequest], work: Work) -> Rendered:
        begun = self._clock()
        results: Sequence[np.ndarray | Exception]
        try:
            results = work()
        except Exception as error:  # one that no batch would survive
            results = [error] * len(batch)
        return Rendered(batch, results, self._clock() - begun)

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
