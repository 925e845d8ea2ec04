"""The service: what is rendered together, and in which order. The engine is a fake."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from cosyvoice_triton.constants import SPEAKER_DIM
from cosyvoice_triton.monitoring.metrics import BATCHES, CACHE, CHUNKS, QUEUED, WAITED
from cosyvoice_triton.token2wav.serving import service as serving_service

from tests.support.fake_engine import PROMPT, answered, queue_behind_a_running_chunk


def test_who_has_less_than_was_rendered_because_some_was_cut_comes_first(client, engine):
    client.start(1, [1] * 20)  # 0.8 s
    client.start(2, [2] * 20)
    waiting = queue_behind_a_running_chunk(client, engine, {})
    waiting += [client.post(1, [1] * 2, final=False), client.post(2, [2], final=False, audio_left=0.5)]
    engine.gate.set()
    assert answered(waiting)
    assert engine.batches[-1] == [2, 1]


def test_chunks_that_wait_together_are_rendered_together(service, client, engine):
    waiting = queue_behind_a_running_chunk(client, engine, {1: [1], 2: [2], 3: [3]})
    engine.gate.set()
    audio = [replies.get(timeout=10) for replies in waiting]
    assert [float(a[0]) for a in audio] == [40, 1, 2, 3]
    assert engine.batches == [[40], [1, 2, 3]]
    stats = service.stats()
    assert (stats[BATCHES], stats[CHUNKS], stats[QUEUED], stats[CACHE]) == (2, 4, 0, 4096)


def test_a_chunk_is_made_when_those_before_it_in_its_stream_have_been_rendered(client, engine):
    waiting = queue_behind_a_running_chunk(client, engine, {1: [1]})
    waiting += [client.post(1, [2], final=False), client.post(1, [3], final=True, end=True)]
    engine.gate.set()
    assert [float(replies.get(timeout=10)[0]) for replies in waiting] == [40, 1, 2, 3]
    assert engine.batches == [[40], [1], [2], [3]]


def test_the_wait_of_chunks_is_counted_by_the_services_clock(service, client, engine, clock):
    waiting = queue_behind_a_running_chunk(client, engine, {1: [1], 2: [2]})
    clock.now += 0.25
    engine.gate.set()
    for replies in waiting:
        replies.get(timeout=10)
    assert service.stats()[WAITED] == pytest.approx(0.5)


def test_first_chunks_are_rendered_first_then_those_of_listeners_who_run_out_of_audio_first(
    service, client, engine, clock
):
    client.start(1, [1] * 50)  # 2 s of audio from now on
    clock.now += 0.5
    client.start(2, [2] * 5)  # 0.2 s from now on: falls silent first
    waiting = []
    client.start(3)
    client.start(0)
    engine.gate.clear()
    engine.entered.clear()
    engine.batches.clear()
    waiting.append(client.post(0, [40], final=False))
    assert engine.entered.wait(10)
    waiting += [client.post(1, [1], final=False), client.post(2, [2] * 2, final=False)]
    waiting.append(client.post(3, [3] * 4, final=False))
    engine.gate.set()
    assert answered(waiting)
    assert engine.batches == [[40], [3, 2, 1]]


def other_voice(number):
    return replace(PROMPT, embedding=np.full(SPEAKER_DIM, number, np.float32))


def test_starts_that_wait_together_are_prefilled_together_and_their_first_chunks_share_a_batch(client, engine):
    waiting = queue_behind_a_running_chunk(client, engine, {})
    for stream in (1, 2, 3):
        waiting.append(client.post(stream, start=True, prompt=other_voice(stream)))
        waiting.append(client.post(stream, [stream], final=False))
    engine.gate.set()
    assert answered(waiting)
    assert engine.prefills == [3]
    assert engine.batches == [[40], [1, 2, 3]]


def test_voices_that_cannot_be_prefilled_together_are_prefilled_one_by_one(client, engine):
    def broken(prompts):
        raise RuntimeError("out of memory")

    engine.prefill = broken
    waiting = queue_behind_a_running_chunk(client, engine, {})
    waiting += [client.post(stream, start=True, prompt=other_voice(stream)) for stream in (1, 2)]
    engine.gate.set()
    assert answered(waiting)


def test_an_abort_is_served_before_everything_else(client, engine):
    client.heard(4)
    engine.batches.clear()
    waiting = queue_behind_a_running_chunk(client, engine, {1: [1], 2: [2], 3: [3]})
    closed = []
    engine.close = lambda stream, close=engine.close: (closed.append(len(engine.batches)), close(stream))[1]
    new = client.post(4, start=True, prompt=PROMPT, audio_left=1.0)
    gone = client.post(5, end=True, final=False)
    aborted = client.post(0, end=True, final=False)
    engine.gate.set()
    assert answered([*waiting, new, gone, aborted])
    assert closed[0] == 1  # after the batch that was running, before the others
    assert engine.batches == [[40], [1, 2, 3]]


def test_a_request_behind_a_start_that_fails_waits_for_nothing_else(client, engine, monkeypatch):
    """Both come while the service opens another stream, so that nothing wakes it when the start has failed."""
    monkeypatch.setattr(serving_service, "REAP_SECONDS", 1000.0)
    opening, go_on, opened = threading.Event(), threading.Event(), engine.open

    def slow(prompt, speed):
        opening.set()
        assert go_on.wait(60)
        return opened(prompt, speed)

    engine.open = slow
    other = client.post(1, start=True, prompt=PROMPT)
    assert opening.wait(60)
    failing, behind = client.post(2, [1], start=True), client.post(2, start=True, prompt=PROMPT)
    go_on.set()
    assert isinstance(failing.get(timeout=60), ValueError) and answered([other, behind])
