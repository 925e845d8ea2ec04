"""The thread that renders one batch at a time; the tests of the service have the rest."""

import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
from cosyvoice_triton.token2wav.serving.worker import Worker

from tests.support.waiting import until


def test_an_idle_thread_keeps_nothing_of_its_last_batch() -> None:
    """The request holds its chunk, and the chunk its stream's memory."""

    class Request:
        pass

    done, request = threading.Event(), Request()
    worker = Worker(0, on_done=done.set, clock=time.monotonic)
    kept = weakref.ref(request)
    batch: Any = [request]
    worker.render(batch, lambda: [np.zeros(3, np.float32)])
    assert done.wait(10)
    worker.take()
    del request, batch
    until(lambda: (gc.collect(), kept())[1] is None)  # the thread may still be on its way to rest
    worker.close()
