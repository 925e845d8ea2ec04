"""The thread that renders one batch at a time."""

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton.token2wav.serving.worker import RenderedBatch, Worker

from tests.support.waiting import Clock, until

BATCH: Any = ("one", "two")  # stand for requests, which it only hands back
AUDIO = np.zeros(3, np.float32)


@pytest.fixture
def done() -> threading.Event:
    return threading.Event()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def worker(done: threading.Event, clock: Clock) -> Iterator[Worker]:
    made = Worker(0, on_done=done.set, clock=clock)
    yield made
    made.close()


def test_a_batch_is_handed_back_once_with_its_results_and_its_time(
    worker: Worker, done: threading.Event, clock: Clock
) -> None:
    gate = threading.Event()

    def work() -> Sequence[np.ndarray]:
        gate.wait(10)
        clock.now += 0.5
        return [AUDIO, AUDIO]

    assert worker.idle and worker.take() is None
    worker.render(BATCH, work)
    assert not worker.idle and worker.take() is None
    gate.set()
    assert done.wait(10)
    rendered = worker.take()
    assert rendered == RenderedBatch(BATCH, [AUDIO, AUDIO], 0.5)
    assert worker.idle and worker.take() is None


def test_an_idle_thread_keeps_nothing_of_its_last_batch(worker: Worker, done: threading.Event) -> None:
    """The request holds its chunk, and the chunk its stream's memory."""

    class Request:
        pass

    request = Request()
    kept = weakref.ref(request)
    batch: Any = [request]
    worker.render(batch, lambda: [AUDIO])
    assert done.wait(10)
    worker.take()
    del request, batch
    until(lambda: (gc.collect(), kept())[1] is None)  # the thread may still be on its way to rest
