"""The service on an engine that renders first chunks and two other batches at the same time. The engine is a fake."""

import pytest

from common.token2wav.admission import Admission
from common.token2wav.scheduler import BACKLOG_SHARE
from tests.support.fake_engine import NEW, PROMPT, FakeLanes, ended, until, value

BACKLOG = round(BACKLOG_SHARE * FakeLanes.batch_tokens)  # tokens that wait for which lane 2 renders


@pytest.fixture
def engine():
    return FakeLanes(lanes=3)


@pytest.fixture(autouse=True)
def ends(service, engine):
    with ended(service, engine):
        yield


@pytest.fixture
def hold_0(client, engine):
    """Lane 0 renders token 90, a later chunk of a stream, until `engine.gate` is set; its replies."""
    client.start(90, [90])
    engine.gate.clear()
    engine.entered.clear()
    replies = client.post(90, [90], final=False)
    assert engine.entered.wait(10)
    return replies


def post(client, streams, tokens):
    """A later chunk of so many tokens, all of the stream's number, for each of the streams; their replies."""
    for stream in streams:
        client.start(stream, [stream])
    return [client.post(stream, [stream] * tokens, final=False) for stream in streams]


@pytest.fixture
def hold_2(client, engine, hold_0):
    """Besides, lane 2 renders the backlog of stream 92; its replies."""
    engine.more_gate.clear()
    (replies,) = post(client, [92], BACKLOG)
    assert engine.more_entered.wait(10)
    return replies


def test_a_backlog_is_rendered_beside_the_batch_of_lane_0(client, engine, hold_0):
    waiting = post(client, range(20, 24), BACKLOG // 4)
    assert [value(each) for each in waiting] == list(range(20, 24))
    assert engine.batches == [] and sum(engine.more, []) == list(range(20, 24))
    engine.gate.set()
    assert value(hold_0) == 90


def test_less_than_a_backlog_waits_for_lane_0(client, engine, hold_0):
    waiting = post(client, range(20, 24), BACKLOG // 4 - 1)
    assert value(client.post(1, [1], final=False, **NEW)) == 1  # by the lane of first chunks
    assert engine.starts[-1] == [1] and engine.more == [] and all(each.empty() for each in waiting)
    engine.gate.set()
    assert [value(each) for each in (hold_0, *waiting)] == [90, *range(20, 24)]
    assert engine.batches == [[90], list(range(20, 24))] and engine.more == []


def test_lane_0_takes_what_is_urgent_before_lane_2_does(client, engine):
    """Both are idle, and nothing remains for lane 2."""
    (one,) = post(client, [20], BACKLOG)
    assert value(one) == 20 and engine.batches == [[20]] and engine.more == []


def test_a_stream_is_in_one_lane_at_a_time(client, engine, hold_2, hold_0):
    following = client.post(92, [7] * BACKLOG, final=False)
    engine.gate.set()
    assert value(hold_0) == 90
    assert [value(each) for each in post(client, [1], 2)] == [1]  # by lane 0, which has looked at it meanwhile
    assert engine.batches == [[90], [1]] and following.empty()
    engine.more_gate.set()
    assert [value(hold_2), value(following)] == [92, 7]


def test_only_lane_0_renders_whole_utterances(client, engine, hold_0):
    whole = client.post(5, [5] * BACKLOG, start=True, end=True, prompt=PROMPT)
    until(lambda: client.service.stats().queued == 1)
    (chunk,) = post(client, [1], BACKLOG)
    assert value(chunk) == 1 and engine.more == [[1]] and whole.empty()
    engine.gate.set()
    assert (value(hold_0), value(whole)) == (90, 5)


def test_the_cost_of_a_batch_is_its_share_of_the_time(client, engine, clock, hold_2, hold_0, monkeypatch):
    """Both lanes render for four seconds, then one for another. A first chunk beside them takes no share."""
    seconds = []
    monkeypatch.setattr(Admission, "rendered", lambda _, chunks, tokens, speech, took: seconds.append(took))
    engine.starts_gate.clear()
    engine.starts_entered.clear()
    first = client.post(91, [91], final=False, **NEW)
    assert engine.starts_entered.wait(10)
    clock.now += 4
    engine.more_gate.set()
    assert value(hold_2) == 92
    clock.now += 1
    engine.gate.set()
    assert value(hold_0) == 90
    engine.starts_gate.set()
    assert value(first) == 91
    assert seconds == [2, 3]
