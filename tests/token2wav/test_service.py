"""The service, its table of sessions and its threads: every request gets one reply, every stream is freed whatever ends
it, also under a random load of many clients in real time. The engine is a fake."""

import asyncio
import dataclasses
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton.constants import HOP_SAMPLES, SPEAKER_DIM
from cosyvoice_triton.errors import FatalError, OverloadedError, UnavailableError
from cosyvoice_triton.monitoring.metrics import QUEUED, STREAMS
from cosyvoice_triton.profiles import UNLIMITED, Profile
from cosyvoice_triton.token2wav.serving.requests import Token2WavRequest
from cosyvoice_triton.token2wav.serving.service import Token2WavService
from cosyvoice_triton.token2wav.serving.worker import Worker

from tests.support.fake_engine import (
    NEW,
    NO_TOKENS,
    PROMPT,
    Client,
    FakeEngine,
    answered,
    queue_behind_a_running_chunk,
    running_chunk,
    two_workers,
)
from tests.support.waiting import until

# Chunks fail together in a batch, and what comes after a failed one finds no stream.
FAILURES = "bad chunk", "broken chunk", "is not live", "was ended before"


def test_a_stream_is_opened_rendered_and_freed_by_its_final_chunk(service, client):
    assert len(client.start(1)) == 0
    assert len(client.send(1, [4, 5], final=False)) == 4 * HOP_SAMPLES
    assert service.stats()[STREAMS] == 1
    assert len(client.send(1, [6], final=True, end=True)) == 2 * HOP_SAMPLES
    assert service.stats()[STREAMS] == 0


def test_end_without_a_final_chunk_drops_the_stream_and_makes_no_audio(service, client, engine):
    client.start(1, [4, 5])
    assert len(client.send(1, [6, 7], end=True, final=False)) == 0
    assert service.stats()[STREAMS] == 0
    assert engine.batches == [[4]]


@pytest.mark.parametrize(("token", "error"), [(12, RuntimeError), (13, RuntimeError), (14, ValueError)])
def test_a_failed_chunk_frees_its_stream_and_no_other(service, client, token, error):
    client.start(1)
    client.start(2)
    with pytest.raises(error, match="chunk"):
        client.send(1, [token], final=False)
    assert service.stats()[STREAMS] == 1
    with pytest.raises(ValueError, match="sequence 1 is not live"):
        client.send(1, [4], final=False)
    assert len(client.send(2, [4], final=False)) == 2 * HOP_SAMPLES


@pytest.mark.parametrize(("token", "other"), [(12, np.ndarray), (13, RuntimeError)], ids=["alone", "with its batch"])
def test_a_chunk_that_fails_is_an_error_for_itself_or_for_each_of_its_batch(service, client, engine, token, other):
    waiting = queue_behind_a_running_chunk(client, engine, {1: [token], 2: [5]})
    engine.gate.set()
    replies = [replies.get(timeout=10) for replies in waiting]
    assert [type(reply) for reply in replies] == [np.ndarray, RuntimeError, other]
    assert service.stats()[STREAMS] == (2 if other is np.ndarray else 1)


def test_the_service_tests_itself_through_its_queue(service, engine):
    engine.sample = lambda: (PROMPT, np.arange(3))
    service.test()
    assert engine.batches == [[0]] and engine.live == 0
    engine.sample = lambda: (PROMPT, np.array([13]))
    with pytest.raises(RuntimeError, match="broken chunk"):
        service.test()
    assert engine.live == 0


def test_a_cancelled_request_that_waited_frees_its_stream_unrendered(service, client, engine, clock):
    replies = queue_behind_a_running_chunk(client, engine, {})
    client_gone = client.post(1, [4], is_cancelled=lambda: True, start=True, prompt=PROMPT, final=False)
    clock.now += 1
    engine.gate.set()
    assert isinstance(client_gone.get(timeout=10), asyncio.CancelledError)
    assert len(replies[0].get(timeout=10))
    assert service.stats()[STREAMS] == 1
    assert engine.batches == [[40]]


def test_a_chunk_that_just_arrived_is_not_checked_for_cancellation(client):
    client.start(1)
    assert len(client.send(1, [4], is_cancelled=lambda: pytest.fail("asked"), final=False))


def test_a_whole_utterance_is_not_rendered_for_a_client_that_left(client, engine):
    engine.whole = lambda *_: pytest.fail("rendered")
    with pytest.raises(asyncio.CancelledError):
        client.send(1, [4], is_cancelled=lambda: True, start=True, end=True, prompt=PROMPT)


def test_a_whole_utterance_ends_between_two_steps_once_its_client_has_gone(client, engine, clock):
    begun, gone = threading.Event(), threading.Event()

    def whole(prompt, tokens, speed, before_step):
        for _ in range(tokens[0]):
            clock.now += 1
            before_step()
            begun.set()
            time.sleep(0.01)
        return np.ones(3, np.float32)

    engine.whole = whole
    reply = client.post(1, [10**6], is_cancelled=gone.is_set, start=True, end=True, prompt=PROMPT)
    assert begun.wait(10)
    gone.set()
    assert isinstance(reply.get(timeout=60), asyncio.CancelledError)
    assert len(client.send(2, [2], start=True, end=True, prompt=PROMPT)) == 3


def test_a_failed_check_for_cancellation_does_not_end_the_service(client):
    def broken():
        raise RuntimeError("no answer from tritonserver")

    arguments = {"start": True, "end": True, "prompt": PROMPT}
    assert len(client.send(1, [4], is_cancelled=broken, **arguments)) == 2 * HOP_SAMPLES
    assert len(client.send(2, [4], **arguments)) == 2 * HOP_SAMPLES


def test_an_idle_stream_is_freed_and_reported(service, client, clock):
    client.start(1)
    clock.now += 6
    client.start(2)
    assert service.stats()[STREAMS] == 1
    with pytest.raises(ValueError, match="idle for 5 s"):
        client.send(1, [4], final=False)


def test_a_stream_without_a_start_opens_with_its_first_request(service, client):
    for _ in range(2):  # its id can be used again
        chunk = {"start": None, "prompt": PROMPT}
        assert len(client.send("request 1", [4, 5], final=False, **chunk)) == 4 * HOP_SAMPLES
        client.start(1)  # another stream
        assert service.stats()[STREAMS] == 2
        assert len(client.send("request 1", [6], final=True, end=True, **chunk)) == 2 * HOP_SAMPLES
        assert service.stats()[STREAMS] == 1


def test_a_stream_without_a_start_that_was_idle_is_refused_once(service, client, clock):
    """Otherwise the rest of an utterance would be rendered as if it were the beginning of one."""
    chunk = {"start": None, "prompt": PROMPT, "final": False}
    client.send("request 1", [4], **chunk)
    clock.now += 6
    client.send(2, end=True)  # the service frees idle streams while it waits
    with pytest.raises(ValueError, match="request 1 was idle for 5 s and was freed"):
        client.send("request 1", [5], **chunk)
    assert service.stats()[STREAMS] == 0
    assert len(client.send("request 1", [4], **chunk))


def test_the_voice_of_a_stream_cannot_change(service, client):
    other = dataclasses.replace(PROMPT, embedding=PROMPT.embedding + 1)
    client.send("request 1", [4], start=None, prompt=PROMPT, final=False)
    with pytest.raises(ValueError, match="request 1 began with another prompt"):
        client.send("request 1", [5], start=None, prompt=other, final=False)
    assert service.stats()[STREAMS] == 0


def test_a_whole_utterance_needs_no_stream(service, client):
    audio = client.send(1, [7, 8], start=True, end=True, prompt=PROMPT)
    assert len(audio) == 4 * HOP_SAMPLES
    assert len(client.send(1, [7, 8], start=True, end=True, prompt=PROMPT, speed=2.0)) == 2 * HOP_SAMPLES
    assert service.stats()[STREAMS] == 0


def test_a_stream_has_the_speed_of_its_first_request(client):
    audio = client.send(1, [4, 5], start=True, prompt=PROMPT, speed=2.0)
    assert len(audio) == len(client.send(1, [6, 7])) == 2 * HOP_SAMPLES


def test_a_reply_that_raises_does_not_end_the_service(service, client):
    def broken(_):
        raise OSError("the receiver left")

    service.submit(Token2WavRequest("sequence 1", start=True, end=False, tokens=NO_TOKENS, prompt=PROMPT), broken)
    assert len(client.send(2, [4], start=True, prompt=PROMPT)) == 2 * HOP_SAMPLES


def test_closing_refuses_queued_and_new_requests(engine, clock):
    service = Token2WavService(engine, idle_seconds=5.0, clock=clock)
    client = Client(service)
    client.start(1)
    running = running_chunk(client, engine, 1, [4])
    queued = client.post(1, [5], final=False)
    closing = threading.Thread(target=service.close)
    closing.start()
    engine.gate.set()
    closing.join(10)
    assert len(running.get(timeout=10))
    assert isinstance(queued.get(timeout=10), UnavailableError)
    with pytest.raises(UnavailableError, match="shutting down"):
        client.post(1, [4], final=False)
    assert service.stats()[STREAMS] == 0


def test_a_service_that_fails_in_a_batch_replies_once_to_each_of_its_chunks(service, client, engine):
    close = engine.close

    def close_and_fail(stream):
        engine.close = close
        close(stream)
        raise RuntimeError("a double release")

    waiting = queue_behind_a_running_chunk(client, engine, {1: [1], 2: [13], 3: [1]})
    engine.close = close_and_fail
    engine.gate.set()
    replies = [replies.get(timeout=10) for replies in waiting]
    assert [type(reply) for reply in replies] == [np.ndarray, *[FatalError] * 3]
    assert all(replies.empty() for replies in waiting)


def test_a_stream_whose_next_segment_came_early_is_remembered_from_its_last_end_on(client, engine, clock):
    client.start("a")
    running = [running_chunk(client, engine, "a", [1]), client.post("a", [2], end=True, final=True)]
    running.append(client.post("a", **NEW))
    engine.gate.set()
    assert answered(running)
    client.heard("b")
    clock.now += 4
    client.send("a", [3], end=True, final=True)
    clock.now += 4
    for stream in range(4):
        client.start(stream)
    assert client.post("a", **NEW, audio_left=1.0).empty()
    with pytest.raises(OverloadedError):
        client.post("b", **NEW, audio_left=1.0)


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


class Talker(threading.Thread):
    """A client with many streams, one after another; `wrong` is what it got and did not expect."""

    def __init__(self, service, seed, streams):
        super().__init__()
        self._client, self._random = Client(service), np.random.default_rng(seed)
        self._ids = [f"{seed}-{number}" for number in range(streams)]
        self.wrong, self.answered = [], 0

    def run(self):
        for stream in self._ids:
            try:
                posted = self._whole(stream) if self._random.random() < 0.1 else self._stream(stream)
                for replies, token in posted:
                    self._check(stream, replies, token)
            except BaseException as error:
                self.wrong.append(f"{stream}: {error!r}")

    def _voice(self):
        return replace(PROMPT, embedding=np.full(SPEAKER_DIM, self._random.integers(6), np.float32))

    def _whole(self, stream):
        return [(self._client.post(stream, [7], start=True, end=True, prompt=self._voice()), 7)]

    def _stream(self, stream):
        """Posts chunks ahead of their answers, of which one may fail, then a final one or an abort. Returns each one's
        replies and the token that they are of."""
        tokens = self._random.integers(16, 60, self._random.integers(1, 7)).tolist()
        if self._random.random() < 0.1:
            tokens[-1] = int(self._random.choice([12, 13, 14]))
        aborted = self._random.random() < 0.3
        posted = []
        for number, token in enumerate(tokens):
            final = not aborted and number == len(tokens) - 1
            opening = {"start": True, "prompt": self._voice()} if number == 0 else {}
            if number == 0 and self._random.random() < 0.2:  # of a later segment, which waits for a slot
                opening["audio_left"] = 1.0
            length = 30 if self._random.random() < 0.1 else 2
            chunk = self._post(stream, [token] * length, final=final, end=final, **opening)
            posted.append((chunk, token))
            if self._random.random() < 0.3:
                time.sleep(self._random.random() / 500)
        return [*posted, (self._client.post(stream, end=True), None)] if aborted else posted

    def _post(self, *args, **kwargs):
        while True:
            try:
                return self._client.post(*args, **kwargs)
            except OverloadedError:
                time.sleep(0.002)

    def _check(self, stream, replies, token):
        reply = replies.get(timeout=30)
        self.answered += 1
        if isinstance(reply, BaseException):
            expected = any(failure in str(reply) for failure in FAILURES)
        else:
            expected = (float(reply[0]) if len(reply) else None) == token
        if not expected or not replies.empty():
            self.wrong.append(f"{stream}: {reply!r} for {token}, and {replies.qsize()} more replies")


@pytest.mark.parametrize("make", [FakeEngine, two_workers])
def test_many_random_streams_get_their_own_audio_in_order(make):
    """More clients than slots; random lengths of batches, failures and aborts."""
    limits = replace(make().limits, profile=Profile(admission=UNLIMITED))
    engine, random, interval = make(limits=limits), np.random.default_rng(0), sys.getswitchinterval()
    engine.gate.wait = engine.starts_gate.wait = lambda _: time.sleep(random.random() / 1000)
    sys.setswitchinterval(1e-5)  # the threads meet at more places
    service = Token2WavService(engine, idle_seconds=60.0)
    talkers = [Talker(service, seed, streams=30) for seed in range(32)]
    for talker in talkers:
        talker.start()
    for talker in talkers:
        talker.join(60)
    assert [wrong for talker in talkers for wrong in talker.wrong] == []
    assert sum(talker.answered for talker in talkers) > 2500 and len(engine.batches) > 50
    stats = service.stats()
    service.close()
    sys.setswitchinterval(interval)
    assert (stats[STREAMS], stats[QUEUED], engine.live) == (0, 0, 0)
    assert engine.broken == [] and (engine.workers == 1 or len(engine.starts) > 50)
