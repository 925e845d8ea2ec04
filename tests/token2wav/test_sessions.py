"""The table of sessions of a token2wav service, and the thread that renders one batch at a time."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from cosyvoice_triton.token2wav.policy.admission import Admission
from cosyvoice_triton.token2wav.serving.requests import Token2WavRequest
from cosyvoice_triton.token2wav.serving.session import Session, Sessions
from cosyvoice_triton.token2wav.serving.worker import Worker

from tests.support.fake_engine import PROMPT
from tests.support.waiting import until


class Table:
    """Sessions with a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sessions = Sessions(Admission(8, 1600, 0.0), 8, lambda: self.now)

    def ask(self, name: str) -> Session:
        """Ask for a segment whose listener is said to have a second of audio left."""
        request = Token2WavRequest(name, start=True, end=True, tokens=np.arange(3), prompt=PROMPT, audio_left=1.0)
        self.sessions.add(request)
        return next(session for session in self.sessions if session.id == name)

    def end(self, session: Session) -> None:
        """End the first segment of a session with its final chunk."""
        self.sessions.finished(session)
        self.sessions.answered(session)

    def remembers(self, name: str) -> bool:
        """Return whether a further segment is known to have a listener: only then is it believed what audio is left."""
        return self.ask(name).first.audio_left is not None


def test_streams_that_ended_long_ago_are_forgotten() -> None:
    table = Table()
    for name in ("a", "b", "c", "d"):
        table.end(table.ask(name))
        table.now += 1
    table.sessions.expire(before=2.0)
    assert [table.remembers(name) for name in ("a", "b", "c", "d")] == [False, False, True, True]


def test_a_stream_whose_next_segment_came_early_is_remembered_from_its_last_end_on() -> None:
    table = Table()
    session = table.ask("a")
    table.ask("a")
    table.end(session)
    table.end(table.ask("b"))
    table.now = 50.0
    table.end(session)
    table.sessions.expire(before=40.0)
    assert [table.remembers("a"), table.remembers("b")] == [True, False]


def test_a_batch_took_what_the_one_before_left_of_the_time() -> None:
    """It was begun while that one was nearly done, and waited for it."""
    now, begun, ends = 0.0, list[int](), [threading.Event(), threading.Event()]
    worker = Worker(0, threads=2, on_change=lambda: None, clock=lambda: now)

    def work(of: int, go_on: Callable[[], None]) -> list[np.ndarray]:
        begun.append(of)
        go_on()
        assert ends[of].wait(10)
        return []

    taken = list[float]()
    worker.render([], partial(work, 0))
    until(lambda: worker.idle)
    now = 1.0
    worker.render([], partial(work, 1))
    until(lambda: begun == [0, 1])
    assert not worker.idle
    for index, at in ((0, 5.0), (1, 7.0)):
        now = at
        ends[index].set()
        until(lambda: (done := worker.take()) is not None and not taken.append(done.seconds))
    assert taken == [5.0, 2.0]
    worker.close()


def test_an_idle_thread_keeps_nothing_of_its_last_batch() -> None:
    """The request holds its chunk, and the chunk its stream's memory."""

    class Request:
        pass

    done, request = threading.Event(), Request()
    worker = Worker(0, on_change=done.set, clock=time.monotonic)
    kept = weakref.ref(request)
    batch: Any = [request]
    worker.render(batch, lambda _: [np.zeros(3, np.float32)])
    assert done.wait(10)
    worker.take()
    del request, batch
    until(lambda: (gc.collect(), kept())[1] is None)  # the thread may still be on its way to rest
    worker.close()
