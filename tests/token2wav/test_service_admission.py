"""The service: who waits, who is refused, what is rendered together, in which order, and what is counted. The engine is
a fake."""

import re
import threading
from dataclasses import replace

import numpy as np
import pytest
from cosyvoice_triton import refusals
from cosyvoice_triton.constants import CALLS_AT_ONCE, HOP_SAMPLES, SPEAKER_DIM
from cosyvoice_triton.errors import OverloadedError, UnavailableError
from cosyvoice_triton.monitoring import metrics
from cosyvoice_triton.token2wav.serving import service as serving_service

from tests.support.fake_engine import NEW, PROMPT, answered, queue_behind_a_running_chunk, running_chunk, value
from tests.support.waiting import until


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
    assert (stats[metrics.BATCHES], stats[metrics.CHUNKS], stats[metrics.QUEUED], stats[metrics.CACHE]) == (
        2,
        4,
        0,
        4096,
    )


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
    assert service.stats()[metrics.WAITED] == pytest.approx(0.5)


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
    with pytest.raises(ValueError, match="the first request of a stream needs a voice"):
        value(failing)
    assert answered([other, behind])


@pytest.mark.parametrize("last", [{}, {"tokens": [5], "final": True}])
def test_a_later_segment_waits_for_a_slot_and_its_requests_keep_their_order(service, client, engine, last):
    """Its listener is more urgent: they have no audio left, and the ending one has."""
    client.heard(4), client.heard("request a")
    replies = queue_behind_a_running_chunk(client, engine, {1: [1], 2: [2], 3: [3]})
    starts = client.post(4, start=True, prompt=PROMPT, audio_left=-1.0)
    first_chunk = client.post(4, [4], final=False)
    waits = client.post("request a", [6], start=None, prompt=PROMPT, final=False, audio_left=0.0)
    engine.gate.set()
    assert answered(replies)
    assert len(client.send(1, [1], final=False)) and len(client.send(9, [9], start=True, end=True, prompt=PROMPT))
    assert starts.empty() and waits.empty() and service.stats()[metrics.QUEUED] == 3
    ends = client.post(0, end=True, **last)
    assert answered([ends, starts, first_chunk])
    assert service.stats()[metrics.STREAMS] == 4 and waits.empty()
    client.send(1, end=True)
    assert len(waits.get(timeout=10)) and len(client.send("request a", end=True)) == 0
    assert service.stats()[metrics.STREAMS] == 3


def test_a_new_stream_waits_for_room_for_its_voice_and_is_not_refused(service, client, engine):
    """Slots are free all the while. The service's own test takes none of the room."""
    engine.room = 2
    engine.sample = lambda: (PROMPT, np.arange(3))
    client.start(1), client.start(2)
    waiting = client.post(3, [7], start=True, prompt=PROMPT, final=False)
    assert len(client.send(1, [5], final=False)) == 2 * HOP_SAMPLES
    test = threading.Thread(target=service.test, daemon=True)
    test.start()
    test.join(5)
    assert waiting.empty() and not test.is_alive()
    client.send(1, [6], final=True, end=True)
    assert len(waiting.get(timeout=10)) == 2 * HOP_SAMPLES
    client.send(2, end=True), client.send(3, end=True)


def test_a_stream_that_is_aborted_while_it_waits_for_a_slot_ends_at_once(service, client):
    client.heard(4)
    for stream_id in range(4):
        client.start(stream_id)
    waiting = [client.post(4, **NEW, audio_left=1.0), client.post(4, [4], final=False)]
    assert len(client.send(4, end=True)) == 0
    assert [type(replies.get(timeout=10)) for replies in waiting] == [UnavailableError] * 2
    assert service.stats()[metrics.QUEUED] == 0


@pytest.mark.parametrize("last", [{}, {"final": True, "end": True}])
def test_the_place_of_a_listener_who_leaves_is_free_before_their_chunk_is_rendered(service, client, engine, last):
    for stream_id in range(4):
        client.start(stream_id)
    engine.batches.clear()
    rendered = queue_behind_a_running_chunk(client, engine, {})
    waiting = client.post(1, [1], **{"final": False, **last})
    with pytest.raises(OverloadedError):
        client.post(4, start=True)
    left = [client.post(stream_id, end=True) for stream_id in (0, 1)]
    places = [client.send(stream_id, start=True) for stream_id in (4, 5)]
    with pytest.raises(OverloadedError):
        client.post(6, start=True)
    opened = client.post(4, prompt=PROMPT)
    assert not engine.batches and opened.empty()
    engine.gate.set()
    assert answered([*rendered, *left, opened]) and len(places) == 2
    assert isinstance(waiting.get(timeout=10), UnavailableError)
    assert engine.batches == [[40]] and service.stats()[metrics.STREAMS] == 3


def test_a_new_listener_who_would_be_too_many_is_refused_while_a_batch_is_rendered(full, engine, monkeypatch, caplog):
    monkeypatch.setattr(refusals, "LOG_SECONDS", 0.0)
    for request in (NEW, {"start": True}, {**NEW, "tokens": [4], "final": True, "end": True}):
        with pytest.raises(OverloadedError, match="listeners: 4, .* there is room for 4"):
            full.post(5, **request)
    with pytest.raises(OverloadedError):
        full.post("request a", [6], start=None, prompt=PROMPT, final=False)
    assert full.service.stats()[metrics.REFUSED.sample(reason="streams")] == 4
    until(lambda: re.search(r"refused within 0 s: \d streams", caplog.text))
    assert not engine.gate.is_set()


def test_refusals_that_are_not_yet_in_the_log_are_written_when_the_service_ends(full, engine, caplog):
    with pytest.raises(OverloadedError):
        full.post(5, **NEW)
    assert "refused" not in caplog.text
    engine.gate.set()
    full.service.close()
    assert "refused within 60 s: 1 streams" in caplog.text


def test_the_more_streams_have_ended_the_sooner_a_refused_listener_may_try_again(client):
    def wait() -> float:
        for stream_id in range(4):
            client.start(stream_id)
        with pytest.raises(OverloadedError) as refused:
            client.post(5, **NEW)
        for stream_id in range(4):
            client.send(stream_id, end=True)
        return refused.value.retry_after

    assert wait() > 1.5 * wait()


def test_those_who_listen_already_are_never_refused(full, engine):
    """A later segment, a stream that is begun again, the requests of one, and its end."""
    replies = [full.post(5, [5], **NEW, final=True, end=True, audio_left=1.0), full.post(3, [7], **NEW, final=False)]
    replies += [full.post(2, [8], final=False), full.post(1, end=True), full.post(9, end=True)]
    replies.append(full.post(6, [9], start=True, end=True, prompt=PROMPT))  # nobody listens to a whole utterance yet
    engine.gate.set()
    assert answered(replies)


@pytest.mark.parametrize("start", [True, None])
def test_who_has_heard_nothing_of_a_stream_is_a_new_listener_whatever_they_say(full, start, engine):
    """A segment of 5 has been heard, and has one that follows."""
    for stream in (4, 6, "request a"):
        with pytest.raises(OverloadedError, match="there is room for 4"):
            full.post(stream, [5], start=start, prompt=PROMPT, final=False, audio_left=3600.0)
    follows, ends = full.post(5, [5], **NEW, final=True, end=True, audio_left=1.0), full.post(1, end=True)
    engine.gate.set()
    assert len(ends.get(timeout=10)) == 0 and len(follows.get(timeout=10))


def test_a_listener_is_forgotten_once_their_stream_would_have_been_idle(service, client, clock):
    client.heard(5)
    clock.now += 6
    for stream in range(4):
        client.start(stream)  # the service frees idle streams before it opens one
    with pytest.raises(OverloadedError):
        client.post(5, **NEW, audio_left=1.0)


def test_a_place_is_reserved_at_once_and_the_voice_comes_later(service, client, engine):
    replies = queue_behind_a_running_chunk(client, engine, {1: [1]})
    assert len(client.send(2, start=True)) == 0, "answered while a batch is rendered"
    client.send(3, start=True)
    with pytest.raises(OverloadedError, match="there is room for 4"):
        client.post(4, start=True)
    voice, chunk = client.post(2, prompt=PROMPT), client.post(2, [2], final=False)
    engine.gate.set()
    assert answered([*replies, voice, chunk])
    assert service.stats()[metrics.STREAMS] == 3


@pytest.mark.parametrize("end", ["the sender gives it up", "nothing comes"])
def test_a_place_that_is_not_used_is_free_again(service, client, clock, end):
    for stream_id in range(4):
        client.send(stream_id, start=True)
    with pytest.raises(OverloadedError):
        client.post(4, start=True)
    if end == "nothing comes":
        clock.now += 6
        client.send(9, end=True)  # the service frees places while it works
    else:
        client.send(0, end=True)
    assert len(client.send(4, start=True)) == 0
    with pytest.raises(ValueError, match="sequence 0 is not live"):
        client.send(0, prompt=PROMPT)


def test_a_queue_that_is_full_refuses_all_but_ends(full, engine):
    limit = 2 * 4 + CALLS_AT_ONCE
    replies = [full.post(1, [4], final=False) for _ in range(limit - 3)]
    with pytest.raises(UnavailableError, match=f"queue is full: {limit} requests wait"):
        full.post(1, [4], final=False)
    ended = full.post(9, end=True)
    engine.gate.set()
    assert all(len(reply.get(timeout=10)) for reply in replies) and len(ended.get(timeout=10)) == 0


def test_a_whole_utterance_waits_for_listeners(client, engine, clock):
    whole = []
    engine.whole = lambda *_: whole.append(len(engine.batches)) or np.zeros(1, np.float32)
    client.start(1, [1] * 50)  # two seconds of audio
    client.start(2, [2] * 50)
    replies = queue_behind_a_running_chunk(client, engine, {})
    replies.append(client.post(3, [9], start=True, end=True, prompt=PROMPT))
    replies += [client.post(1, [1], final=False)]
    engine.gate.set()
    assert answered(replies)
    assert whole == [4], "after the chunk of the first"


def test_gaps_of_the_listeners_and_the_wait_of_starts_are_counted(service, client, engine, clock):
    client.start(1, [1] * 25)  # a second
    clock.now += 1.0
    client.send(1, [1] * 25, final=False)  # another one, in time for a player that begins 0.25 s after the first audio
    clock.now += 1.75
    client.send(1, [1], final=False)
    values = service.stats()
    assert (values[metrics.GAPS], values[metrics.GAP_SECONDS]) == (1, pytest.approx(0.5))
    running = running_chunk(client, engine, 1, [1])
    start = client.post(2, **NEW)
    clock.now += 0.3
    engine.gate.set()
    assert len(running.get(timeout=10)) and len(start.get(timeout=10)) == 0
    values = service.stats()
    assert (values[metrics.OPENED], values[metrics.OPENED_WAITED]) == (2, pytest.approx(0.3))
