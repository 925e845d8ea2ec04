"""The service on an engine that renders first chunks apart from other batches. The engine is a fake."""

import threading
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from cosyvoice_triton.constants import SPEAKER_DIM
from cosyvoice_triton.errors import FatalError, UnavailableError
from cosyvoice_triton.monitoring.metrics import QUEUED
from cosyvoice_triton.profiles import H200
from cosyvoice_triton.token2wav.policy.admission import Admission

from tests.support.fake_engine import NEW, PROMPT, running_chunk, started, two_workers, value
from tests.support.waiting import until


@pytest.fixture
def engine():
    return two_workers()


def hold_batches(client, engine, stream=90):
    """The other worker renders token 90, a later chunk of a stream, until `engine.gate` is set; its replies."""
    client.start(stream, [stream])
    return running_chunk(client, engine, stream, [stream])


@contextmanager
def first_chunk(client, engine, stream=91):
    """The worker of first chunks renders token 91 during the block."""
    engine.starts_gate.clear()
    engine.starts_entered.clear()
    replies = client.post(stream, [stream], final=False, **NEW)
    assert engine.starts_entered.wait(10)
    yield
    engine.starts_gate.set()
    assert value(replies) == stream


def test_a_first_chunk_does_not_wait_for_another_batch(client, engine):
    held = hold_batches(client, engine)
    assert value(client.post(1, [1], final=False, **NEW)) == 1
    assert engine.starts == [[90], [1]] and engine.batches == []
    engine.gate.set()
    assert value(held) == 90


def test_one_batch_is_prepared_behind_another_once_that_is_nearly_done(client, engine):
    """And only one, of listeners who go on: voices are prefilled between batches of first chunks."""
    for stream in (1, 2, 3):
        client.start(stream, [stream])
    held = hold_batches(client, engine)
    waiting = client.post(1, [1], final=False)
    until(lambda: client.service.stats()[QUEUED] == 1)
    assert len(engine.rendering) == 1  # it is not nearly done yet
    engine.solves = True
    engine.gate.set()
    assert (value(held), value(waiting)) == (90, 1)

    held = hold_batches(client, engine, 92)
    behind = client.post(2, [2], final=False)
    until(lambda: len(engine.rendering) == 2)
    last = client.post(3, [3], final=False)
    with first_chunk(client, engine):
        until(lambda: client.service.stats()[QUEUED] == 1)
        assert [worker for worker, _ in engine.rendering] == [0, 0, 1]
        engine.gate.set()
    assert [value(each) for each in (held, behind, last)] == [92, 2, 3]


def test_listeners_do_not_wait_for_a_first_chunk(client, engine):
    client.start(1, [1])
    with first_chunk(client, engine):
        assert value(client.post(1, [2], final=False)) == 2
        assert value(client.post(1, [3], final=True, end=True)) == 3
        assert engine.batches == [[2], [3]]


def test_first_chunks_that_wait_together_are_rendered_together_up_to_the_size_of_their_batches(client, engine):
    batches = hold_batches(client, engine)
    with first_chunk(client, engine):
        waiting = [client.post(stream, [stream], final=False, **NEW) for stream in range(20, 32)]
        until(lambda: client.service.stats()[QUEUED] == 12)
    assert [value(each) for each in waiting] == list(range(20, 32))
    assert engine.starts[1:] == [[91], list(range(20, 28)), list(range(28, 32))]
    engine.gate.set()
    assert value(batches) == 90


@pytest.fixture
def crowd(client, engine):
    """Sixteen listeners wait for a batch that is rendered. The replies to all."""
    for stream in range(50, 66):
        client.start(stream, [stream])
    held = hold_batches(client, engine)
    replies = [client.post(stream, [stream], final=False) for stream in range(50, 66)]
    until(lambda: client.service.stats()[QUEUED] == 16)
    engine.starts.clear()
    return [held, *replies]


def test_a_first_chunk_waits_no_longer_than_is_set_for_others(client, engine, crowd, clock, monkeypatch):
    monkeypatch.setattr("cosyvoice_triton.token2wav.serving.service.REAP_SECONDS", 1000.0)
    first = client.post(20, [20], final=False, **NEW)
    until(lambda: client.service.stats()[QUEUED] == 17)
    until(lambda: client.service._gathering)
    assert engine.starts == []
    clock.now += H200.scheduler.gather_seconds + 0.01  # nothing else wakes the service's thread
    assert value(first) == 20 and engine.starts == [[20]] and engine.batches == []
    engine.gate.set()
    assert [value(each) for each in crowd] == [90, *range(50, 66)]


def test_batches_are_not_shortened_for_first_chunks_that_do_not_wait_for_them(client, engine):
    """Listeners with four seconds of audio each."""
    for stream in range(20, 36):
        client.start(stream, [stream] * 100)
    held = hold_batches(client, engine)
    waiting = [client.post(stream, [stream] * 100, final=False) for stream in range(20, 36)]
    until(lambda: client.service.stats()[QUEUED] == 16)
    engine.gate.set()
    assert value(held) == 90 and [value(each) for each in waiting] == list(range(20, 36))
    assert engine.batches[-1] == list(range(20, 36))


def test_the_first_chunk_of_a_later_segment_is_not_rendered_apart(client, engine):
    """Its listener still hears the segment before."""
    client.heard(1)
    engine.batches.clear(), engine.starts.clear()
    assert value(client.post(1, [1], final=False, audio_left=3.0, **NEW)) == 1
    assert engine.batches == [[1]] and engine.starts == []


@pytest.mark.parametrize("tokens", [1, 21], ids=["without other work", "a long one"])
def test_the_other_thread_renders_a_first_chunk(client, engine, tokens):
    with first_chunk(client, engine):
        assert value(client.post(1, [7] * tokens, final=False, **NEW)) == 7
        assert engine.batches == [[7]]


def test_a_new_voice_is_not_prefilled_beside_first_chunks_but_a_known_one_begins(client, engine):
    engine.known.add(PROMPT.digest)
    stranger = replace(PROMPT, embedding=np.ones(SPEAKER_DIM, np.float32))
    with first_chunk(client, engine):
        new = client.post(1, [1], final=False, start=True, prompt=stranger)
        assert value(client.post(2, [2], final=False, **NEW)) == 2
        assert stranger.digest not in engine.known
    assert value(new) == 1 and stranger.digest in engine.known


def test_a_stream_that_restarts_waits_for_the_chunk_that_is_rendered(client, engine):
    with first_chunk(client, engine, 1):
        again = client.post(1, [6], final=True, **NEW)
        assert value(client.post(5, [5], final=True, **NEW)) == 5
        assert again.empty()
    assert value(again) == 6


def test_a_stream_that_is_rendered_is_not_idle(client, engine, clock):
    with first_chunk(client, engine, 1):
        clock.now += 60
        assert value(client.post(5, [5], final=True, **NEW)) == 5
    assert value(client.post(1, [2], final=True, end=True)) == 2


def test_a_first_chunk_does_not_wait_for_a_whole_utterance(client, engine):
    gate, entered = threading.Event(), threading.Event()

    def whole(prompt, tokens, speed, before_step):
        entered.set()
        gate.wait(10)
        return np.full(3, tokens[0], np.float32)

    engine.whole = whole
    utterance = client.post(1, [8], start=True, end=True, prompt=PROMPT)
    assert entered.wait(10)
    assert value(client.post(2, [2], final=True, **NEW)) == 2
    assert utterance.empty()
    gate.set()
    assert value(utterance) == 8


def test_a_whole_utterance_that_fails_says_nothing_about_the_next_ones_wait(client, engine, monkeypatch):
    rendered = []
    monkeypatch.setattr(Admission, "rendered_whole", lambda self, seconds: rendered.append(seconds))

    def broken(*_):
        raise ValueError("no utterance")

    engine.whole, whole = broken, engine.whole
    with pytest.raises(ValueError, match="no utterance"):
        client.send(1, [8], start=True, end=True, prompt=PROMPT)
    assert rendered == []
    engine.whole = whole
    assert client.send(1, [8], start=True, end=True, prompt=PROMPT)[0] == 8
    assert len(rendered) == 1


def test_admission_learns_from_the_other_batches_only(client, engine, monkeypatch):
    learnt = []
    monkeypatch.setattr(Admission, "rendered", lambda self, chunks, *_: learnt.append(chunks))
    client.start(1, [1])
    assert learnt == []
    client.send(1, [2], final=False)
    assert learnt == [1]


def test_the_service_tests_the_thread_of_the_other_batches(service, client, engine):
    with first_chunk(client, engine):
        service.test()
        assert len(engine.batches) == 1
    service.test()
    assert len(engine.batches) == 2 and engine.starts == [[91]]


def test_closing_answers_all_even_if_a_batch_cannot_be_answered(service, client, engine, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    with pytest.raises(UnavailableError), first_chunk(client, engine):
        batches = hold_batches(client, engine)
        monkeypatch.setattr(service, "_answer_chunks", broken)
        closing = threading.Thread(target=service.close)
        closing.start()
        engine.gate.set()
        engine.starts_gate.set()
        closing.join(10)
        assert not closing.is_alive()
    with pytest.raises(UnavailableError):
        value(batches)


def test_a_service_that_fails_answers_what_is_rendered_and_refuses_what_waits(client, engine):
    client.start(2)
    batches = hold_batches(client, engine)
    with first_chunk(client, engine):
        waiting = client.post(90, [4], final=False)
        failing = client.post(2, [15], final=False)
    assert batches.empty()
    engine.gate.set()
    assert value(batches) == 90
    for each in (waiting, failing):
        with pytest.raises(UnavailableError, match="own mistake"):
            value(each)
    with pytest.raises(FatalError, match="token2wav has failed"):
        client.post(3, **NEW)


def test_whatever_a_batch_raises_every_request_is_answered(client, engine):
    """Also what no Exception is: it ends the service, which nobody else would notice."""
    client.start(3, [3])
    batches = hold_batches(client, engine)

    def broken(chunks, batches):
        raise SystemExit("broken")

    with pytest.raises(FatalError, match="token2wav has failed: broken"), first_chunk(client, engine):
        waiting = client.post(3, [4], final=False)
        engine.audio = broken
        engine.gate.set()
        until(lambda: client.service._sessions.refusal is not None)
    for each in (batches, waiting):
        with pytest.raises(FatalError, match="token2wav has failed: broken"):
            value(each)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_engine_that_fails_its_warm_up_leaves_no_thread(clock, failing):
    def broken(worker):
        if worker == failing:
            raise ValueError("a bad checkpoint")

    engine, before = two_workers(), threading.active_count()
    engine.warm_up = broken
    with pytest.raises(ValueError, match="a bad checkpoint"):
        started(engine, clock)
    until(lambda: threading.active_count() <= before)
