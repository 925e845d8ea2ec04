"""The service: every request gets one reply, every stream is freed whatever ends it. The engine is a fake."""

import asyncio
import dataclasses
import queue
import threading
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from common.constants import HOP_SAMPLES, MEL_BINS, SPEAKER_DIM
from common.errors import FatalError, OverloadedError, UnavailableError
from common.process.metrics import GAP_SECONDS, GAPS, REFUSED, STARTS, STARTS_WAITED
from common.token2wav.limits import BatchLimits
from common.token2wav.request_queue import MAX_WAITING
from common.token2wav.requests import Token2WavRequest
from common.token2wav.service import Token2WavService
from common.token2wav.stream import Chunk
from common.voice.prompt import Prompt

PROMPT = Prompt(
    tokens=np.arange(5), mel=np.zeros((10, MEL_BINS), np.float32), embedding=np.zeros(SPEAKER_DIM, np.float32), text=""
)
NO_TOKENS = np.zeros(0, np.int64)


@dataclass
class FakeStream:
    rendered: int = 0


@dataclass
class FakeEngine:
    """Answers a chunk with two frames of audio per token. Token 12 makes it fail alone, 13 with its batch, 14 before it
    is rendered, 15 ends the service.

    `gate` holds every step back; `batches` are the first tokens of the chunks that were rendered together.
    """

    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    batches: list[list[int]] = field(default_factory=list)
    known: set[bytes] = field(default_factory=set)  # voices that need no prefill
    prefills: list[int] = field(default_factory=list)  # voices that were prefilled together
    room: int = 99  # for streams, each in a voice of its own
    live: int = 0
    batch_tokens: int = 1600
    cache_bytes: int = 4096
    contexts: tuple[int, float] = (0, 0.0)
    limits: BatchLimits = BatchLimits(max_streams=4)

    def __post_init__(self):
        self.gate.set()

    def warm_up(self):
        pass

    def sample(self, tokens=3):
        return PROMPT, np.zeros(tokens, np.int64)

    def prefill_frames(self, prompt):
        return 0 if prompt.digest in self.known else len(prompt.mel)

    def fitting(self, prompts):
        return [self.live < self.room for _ in prompts]

    def prefill(self, prompts):
        self.prefills.append(len(prompts))
        self.known |= {prompt.digest for prompt in prompts}

    def open(self, prompt):
        self.known.add(prompt.digest)
        self.live += 1
        return FakeStream()

    def close(self, stream):
        self.live -= 1

    def chunk(self, stream, tokens, *, final, offset=None):
        if 14 in tokens:
            raise ValueError("bad chunk")
        if 15 in tokens:
            raise RuntimeError("the scheduler's own mistake")
        return Chunk(stream, tokens, final, stream.rendered, len(tokens), len(tokens))

    def render(self, chunks):
        self.entered.set()
        self.gate.wait(10)
        if any(13 in chunk.tokens for chunk in chunks):
            raise RuntimeError("broken chunk")
        for chunk in chunks:  # as the engine does: a chunk continues the stream as it was when the chunk was made
            assert chunk.offset == chunk.stream.rendered
            chunk.stream.rendered += chunk.new
        self.batches.append([int(chunk.tokens[0]) for chunk in chunks])
        return [
            RuntimeError("bad chunk")
            if 12 in c.tokens
            else np.full(len(c.tokens) * 2 * HOP_SAMPLES, c.tokens[0], np.float32)
            for c in chunks
        ]

    def whole(self, prompt, tokens, speed):
        return np.full(int(len(tokens) * 2 * HOP_SAMPLES / speed), tokens[0], np.float32)


class Client:
    """Sends requests and waits for their replies."""

    def __init__(self, service):
        self.service = service

    def post(self, stream_id, tokens=NO_TOKENS, is_cancelled=lambda: False, **kwargs):
        stream_id = f"sequence {stream_id}" if isinstance(stream_id, int) else stream_id
        request = Token2WavRequest(stream_id, **{"start": False, "end": False, **kwargs}, tokens=np.asarray(tokens))
        replies = queue.Queue()
        self.service.submit(request, replies.put, is_cancelled)
        return replies

    def send(self, *args, **kwargs):
        reply = self.post(*args, **kwargs).get(timeout=10)
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def start(self, stream_id, tokens=NO_TOKENS):
        return self.send(stream_id, tokens, start=True, prompt=PROMPT)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def clock():
    return Clock()


def started(engine, clock, **settings):
    """A service that has measured its engine."""
    service = Token2WavService(engine, idle_seconds=5.0, clock=clock, **settings)
    engine.batches.clear()
    engine.entered.clear()
    engine.known.clear()
    return service


@pytest.fixture
def service(engine, clock):
    service = started(engine, clock, max_start_wait_seconds=60.0)
    yield service
    engine.gate.set()
    service.close()
    assert engine.live == 0


@pytest.fixture
def client(service):
    return Client(service)


def test_a_stream_is_opened_rendered_and_freed_by_its_final_chunk(service, client):
    assert len(client.start(1)) == 0
    assert len(client.send(1, [4, 5], final=False)) == 4 * HOP_SAMPLES
    assert service.stats().live_streams == 1
    assert len(client.send(1, [6], final=True, end=True)) == 2 * HOP_SAMPLES
    assert service.stats().live_streams == 0


def test_end_without_a_final_chunk_drops_the_stream_and_makes_no_audio(service, client, engine):
    client.start(1, [4, 5])
    assert len(client.send(1, [6, 7], end=True, final=False)) == 0
    assert service.stats().live_streams == 0
    assert engine.batches == [[4]]


def test_ending_an_unknown_stream_is_no_error(client):
    assert len(client.send(99, end=True)) == 0


@pytest.mark.parametrize(("token", "error"), [(12, RuntimeError), (13, RuntimeError), (14, ValueError)])
def test_a_failed_chunk_frees_its_stream_and_no_other(service, client, token, error):
    client.start(1)
    client.start(2)
    with pytest.raises(error, match="chunk"):
        client.send(1, [token], final=False)
    assert service.stats().live_streams == 1
    with pytest.raises(ValueError, match="sequence 1 is not live"):
        client.send(1, [4], final=False)
    assert len(client.send(2, [4], final=False)) == 2 * HOP_SAMPLES


def test_a_chunk_that_fails_alone_ends_no_other_stream_of_its_batch(service, client, engine):
    waiting = queue_behind_a_running_chunk(client, engine, {1: [12], 2: [5]})
    engine.gate.set()
    assert isinstance(waiting[1].get(timeout=10), RuntimeError) and len(waiting[2].get(timeout=10))
    assert engine.batches[-1] == [12, 5] and len(client.send(2, [6], final=True, end=True))


def test_the_service_tests_itself_through_its_queue(service, engine):
    engine.sample = lambda: (PROMPT, np.arange(3))
    service.test()
    assert engine.batches == [[0]] and engine.live == 0
    engine.sample = lambda: (PROMPT, np.array([13]))
    with pytest.raises(RuntimeError, match="broken chunk"):
        service.test()
    assert engine.live == 0


def test_a_failed_batch_is_an_error_for_each_of_its_chunks(service, client, engine):
    waiting = queue_behind_a_running_chunk(client, engine, {1: [13], 2: [5]})
    engine.gate.set()
    replies = [replies.get(timeout=10) for replies in waiting]
    assert [type(reply) for reply in replies] == [np.ndarray, RuntimeError, RuntimeError]
    assert service.stats().live_streams == 1


def queue_behind_a_running_chunk(client, engine, chunks):
    """Streams 0 (which is rendering token 40) and those of `chunks`, whose chunks wait; their replies in order."""
    for stream in (0, *chunks):
        client.start(stream)
    engine.gate.clear()
    engine.entered.clear()
    running = client.post(0, [40], final=False)
    assert engine.entered.wait(10)
    return [running, *(client.post(stream, tokens, final=False) for stream, tokens in chunks.items())]


def test_a_cancelled_request_that_waited_frees_its_stream_unrendered(service, client, engine, clock):
    replies = queue_behind_a_running_chunk(client, engine, {})
    client_gone = client.post(1, [4], is_cancelled=lambda: True, start=True, prompt=PROMPT, final=False)
    clock.now += 1
    engine.gate.set()
    assert isinstance(client_gone.get(timeout=10), asyncio.CancelledError)
    assert len(replies[0].get(timeout=10))
    assert service.stats().live_streams == 1
    assert engine.batches == [[40]]


def test_a_chunk_that_just_arrived_is_not_checked_for_cancellation(client):
    client.start(1)
    assert len(client.send(1, [4], is_cancelled=lambda: pytest.fail("asked"), final=False))


def test_a_whole_utterance_is_not_rendered_for_a_client_that_left(client, engine):
    engine.whole = lambda *_: pytest.fail("rendered")
    with pytest.raises(asyncio.CancelledError):
        client.send(1, [4], is_cancelled=lambda: True, start=True, end=True, prompt=PROMPT)


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
    assert service.stats().live_streams == 1
    with pytest.raises(ValueError, match="idle for 5 s"):
        client.send(1, [4], final=False)


@pytest.mark.parametrize("last", [{}, {"tokens": [5], "final": True}])
def test_a_new_stream_waits_until_another_has_ended_and_its_requests_keep_their_order(service, client, engine, last):
    """The new stream is more urgent: none of its audio has been played, and the ending one has audio left."""
    replies = queue_behind_a_running_chunk(client, engine, {1: [1], 2: [2], 3: [3]})
    starts = client.post(4, start=True, prompt=PROMPT)
    first_chunk = client.post(4, [4], final=False)
    waits = client.post("request a", [6], start=None, prompt=PROMPT, final=False)
    engine.gate.set()
    for reply in replies:
        assert isinstance(reply.get(timeout=10), np.ndarray)
    assert len(client.send(1, [1], final=False)) and len(client.send(9, [9], start=True, end=True, prompt=PROMPT))
    assert starts.empty() and waits.empty() and service.stats().queued == 3
    ends = client.post(0, end=True, **last)
    for reply in [ends, starts, first_chunk]:
        assert isinstance(reply.get(timeout=10), np.ndarray)
    assert service.stats().live_streams == 4 and waits.empty()
    client.send(1, end=True)
    assert len(waits.get(timeout=10)) and len(client.send("request a", end=True)) == 0
    assert service.stats().live_streams == 3


def test_its_own_test_needs_no_slot(service, client, engine):
    """All may be taken by streams that idle: that is no failure of the model."""
    rendered = []
    engine.sample = lambda: (PROMPT, np.arange(3))
    engine.whole = lambda *_: rendered.append(1) or np.zeros(1, np.float32)
    for stream_id in range(4):
        client.start(stream_id)
    test = threading.Thread(target=service.test, daemon=True)
    test.start()
    test.join(5)
    assert rendered and service.stats().live_streams == 4


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


def test_a_stream_that_is_aborted_while_it_waits_for_room_ends_at_once(service, client, engine):
    engine.room = 1
    client.start(1)
    waiting = client.post(2, [7], start=True, prompt=PROMPT, final=False)
    client.send(2, end=True)
    assert isinstance(waiting.get(timeout=10), UnavailableError) and engine.live == 1


def test_the_next_segment_of_a_text_does_not_wait_for_new_streams(service, client):
    for stream_id in range(4):
        client.start(stream_id)
    waiting = [client.post(stream_id, start=True, prompt=PROMPT) for stream_id in (4, 5)]
    client.post(6, start=True, prompt=PROMPT, audio_left=1.0)
    client.send(0, end=True)
    assert len(client.send(6, [6], final=False)) and all(replies.empty() for replies in waiting)


def test_a_stream_that_is_aborted_while_it_waits_for_a_slot_ends_at_once(service, client):
    for stream_id in range(4):
        client.start(stream_id)
    waiting = [client.post(4, start=True, prompt=PROMPT), client.post(4, [4], final=False)]
    assert len(client.send(4, end=True)) == 0
    assert [type(replies.get(timeout=10)) for replies in waiting] == [UnavailableError] * 2
    assert service.stats().queued == 0


def test_a_live_stream_restarts_while_all_slots_are_taken(service, client):
    for stream_id in range(4):
        client.start(stream_id)
    assert len(client.start(3, [4])) and service.stats().live_streams == 4


@pytest.fixture
def full(engine, clock):
    """A client of a service with four streams, which is all that it admits; it is rendering."""
    service = started(engine, clock)
    client = Client(service)
    queue_behind_a_running_chunk(client, engine, {1: [1], 2: [2], 3: [3]})
    yield client
    engine.gate.set()
    service.close()
    assert engine.live == 0


NEW = {"start": True, "prompt": PROMPT}


def test_a_new_listener_who_would_be_too_many_is_refused_while_a_batch_is_rendered(full, engine):
    for request in (NEW, {"start": True}, {**NEW, "tokens": [4], "final": True, "end": True}):
        with pytest.raises(OverloadedError, match="of 4 listeners .* there is room for 4"):
            full.post(5, **request)
    with pytest.raises(OverloadedError):
        full.post("request a", [6], start=None, prompt=PROMPT, final=False)
    assert full.service.stats().values()[REFUSED.sample(reason="streams")] == 4
    assert not engine.gate.is_set()


def test_those_who_listen_already_are_never_refused(full, engine):
    """A later segment, a stream that is begun again, the requests of one, and its end."""
    replies = [full.post(5, [5], **NEW, final=True, end=True, audio_left=1.0), full.post(3, [7], **NEW, final=False)]
    replies += [full.post(2, [8], final=False), full.post(1, end=True), full.post(9, end=True)]
    replies.append(full.post(6, [9], start=True, end=True, prompt=PROMPT))  # nobody listens to a whole utterance yet
    engine.gate.set()
    assert all(isinstance(reply.get(timeout=10), np.ndarray) for reply in replies)


def test_a_place_is_reserved_at_once_and_the_voice_comes_later(service, client, engine):
    replies = queue_behind_a_running_chunk(client, engine, {1: [1]})
    assert len(client.send(2, start=True)) == 0, "answered while a batch is rendered"
    client.send(3, start=True)
    with pytest.raises(queue.Empty):  # waits, because four have a place
        client.post(4, start=True).get(timeout=0.05)
    voice, chunk = client.post(2, prompt=PROMPT), client.post(2, [2], final=False)
    engine.gate.set()
    assert all(isinstance(reply.get(timeout=10), np.ndarray) for reply in [*replies, voice, chunk])
    assert service.stats().live_streams == 3


@pytest.mark.parametrize("end", ["the sender gives it up", "nothing comes"])
def test_a_place_that_is_not_used_is_free_again(service, client, clock, end):
    for stream_id in range(4):
        client.send(stream_id, start=True)
    waits = client.post(4, start=True)
    if end == "nothing comes":
        clock.now += 6
    else:
        client.send(0, end=True)
    assert len(waits.get(timeout=10)) == 0
    with pytest.raises(ValueError, match="sequence 0 is not live"):
        client.send(0, prompt=PROMPT)


def test_a_listener_waits_for_a_place_no_longer_than_is_set(engine, clock):
    service = started(engine, clock, max_start_wait_seconds=3.0)
    client = Client(service)
    for stream_id in range(4):
        client.start(stream_id)
    waiting = [client.post(4, start=True), client.post(5, **NEW)]
    clock.now += 2.9
    client.send(0, [1], final=True, end=True)
    assert len(waiting[0].get(timeout=10)) == 0 and waiting[1].empty()
    clock.now += 0.2
    assert isinstance(waiting[1].get(timeout=10), OverloadedError)
    assert service.stats().queued == 0
    service.close()


def test_a_listener_whose_wait_would_be_too_long_is_refused_at_once(service, client, monkeypatch):
    monkeypatch.setattr("common.token2wav.request_queue.MAX_WAITING", 2)
    for stream_id in range(4):
        client.start(stream_id)
    [client.post(stream_id, **NEW) for stream_id in (4, 5)]
    with pytest.raises(OverloadedError):
        client.post(6, **NEW)


def test_a_queue_that_is_full_refuses_all_but_ends(full, engine, monkeypatch):
    limit = 2 * (4 + MAX_WAITING)
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
    assert all(isinstance(reply.get(timeout=10), np.ndarray) for reply in replies)
    assert whole == [4], "after the chunk of the first"


def test_gaps_of_the_listeners_and_the_wait_of_starts_are_counted(service, client, engine, clock):
    client.start(1, [1] * 25)  # a second
    clock.now += 1.0
    client.send(1, [1] * 25, final=False)  # another one, in time for a player that begins 0.25 s after the first audio
    clock.now += 1.75
    client.send(1, [1], final=False)
    values = service.stats().values()
    assert (values[GAPS], values[GAP_SECONDS]) == (1, pytest.approx(0.5))
    engine.gate.clear()
    engine.entered.clear()
    running = client.post(1, [1], final=False)
    assert engine.entered.wait(10)
    start = client.post(2, **NEW)
    clock.now += 0.3
    engine.gate.set()
    assert len(running.get(timeout=10)) and len(start.get(timeout=10)) == 0
    values = service.stats().values()
    assert (values[STARTS], values[STARTS_WAITED]) == (2, pytest.approx(0.3))


def test_a_stream_without_a_start_opens_with_its_first_request(service, client):
    for _ in range(2):  # its id can be used again
        chunk = {"start": None, "prompt": PROMPT}
        assert len(client.send("request 1", [4, 5], final=False, **chunk)) == 4 * HOP_SAMPLES
        client.start(1)  # another stream
        assert service.stats().live_streams == 2
        assert len(client.send("request 1", [6], final=True, end=True, **chunk)) == 2 * HOP_SAMPLES
        assert service.stats().live_streams == 1


def test_a_stream_without_a_start_that_was_idle_is_refused_once(service, client, clock):
    """Otherwise the rest of an utterance would be rendered as if it were the beginning of one."""
    chunk = {"start": None, "prompt": PROMPT, "final": False}
    client.send("request 1", [4], **chunk)
    clock.now += 6
    client.send(2, end=True)  # the service frees idle streams while it waits
    with pytest.raises(ValueError, match="request 1 was idle for 5 s and was freed"):
        client.send("request 1", [5], **chunk)
    assert service.stats().live_streams == 0
    assert len(client.send("request 1", [4], **chunk))


def test_the_voice_of_a_stream_cannot_change(service, client):
    other = dataclasses.replace(PROMPT, embedding=PROMPT.embedding + 1)
    client.send("request 1", [4], start=None, prompt=PROMPT, final=False)
    with pytest.raises(ValueError, match="request 1 began with another prompt"):
        client.send("request 1", [5], start=None, prompt=other, final=False)
    assert service.stats().live_streams == 0


def test_chunks_that_wait_together_are_rendered_together(service, client, engine):
    waiting = queue_behind_a_running_chunk(client, engine, {1: [1], 2: [2], 3: [3]})
    engine.gate.set()
    audio = [replies.get(timeout=10) for replies in waiting]
    assert [float(a[0]) for a in audio] == [40, 1, 2, 3]
    assert engine.batches == [[40], [1, 2, 3]]
    stats = service.stats()
    assert (stats.batches, stats.chunks, stats.queued, stats.cache_bytes) == (2, 4, 0, 4096)


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
    assert service.stats().waited_seconds == pytest.approx(0.5)


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
    for replies in waiting:
        assert isinstance(replies.get(timeout=10), np.ndarray)
    assert engine.batches == [[40], [3, 2, 1]]


def other_voice(number):
    return replace(PROMPT, embedding=np.full(SPEAKER_DIM, number, np.float32))


def test_starts_that_wait_together_are_prefilled_together_and_their_first_chunks_share_a_batch(client, engine):
    waiting = queue_behind_a_running_chunk(client, engine, {})
    for stream in (1, 2, 3):
        waiting.append(client.post(stream, start=True, prompt=other_voice(stream)))
        waiting.append(client.post(stream, [stream], final=False))
    engine.gate.set()
    assert all(isinstance(replies.get(timeout=10), np.ndarray) for replies in waiting)
    assert engine.prefills == [3]
    assert engine.batches == [[40], [1, 2, 3]]


def test_many_starts_do_not_hold_up_a_listener_who_runs_out_of_audio(client, engine, clock):
    """Of two new voices, one is prefilled before the chunk of the listener who has no audio left."""
    waiting = queue_behind_a_running_chunk(client, engine, {1: [1]})
    engine.gate.set()
    [replies.get(timeout=10) for replies in waiting]
    clock.now += 2
    engine.gate.clear()
    engine.entered.clear()
    running = client.post(0, [41], final=False)
    assert engine.entered.wait(10)
    opened = []
    engine.open = lambda prompt, open=engine.open: (opened.append(len(engine.batches)), open(prompt))[1]
    late = client.post(1, [2], final=True, end=True)
    starts = [client.post(stream, start=True, prompt=other_voice(stream)) for stream in (2, 3)]
    engine.gate.set()
    for replies in (running, late, *starts):
        assert isinstance(replies.get(timeout=10), np.ndarray)
    assert engine.batches[-2:] == [[41], [2]]
    assert opened == [3, 4]  # the second one after the late listener's batch


def test_voices_that_cannot_be_prefilled_together_are_prefilled_one_by_one(client, engine):
    def broken(prompts):
        raise RuntimeError("out of memory")

    engine.prefill = broken
    waiting = queue_behind_a_running_chunk(client, engine, {})
    waiting += [client.post(stream, start=True, prompt=other_voice(stream)) for stream in (1, 2)]
    engine.gate.set()
    assert all(isinstance(replies.get(timeout=10), np.ndarray) for replies in waiting)


def test_an_abort_is_served_before_everything_else(client, engine):
    waiting = queue_behind_a_running_chunk(client, engine, {1: [1], 2: [2], 3: [3]})
    closed = []
    engine.close = lambda stream, close=engine.close: (closed.append(len(engine.batches)), close(stream))[1]
    new = client.post(4, start=True, prompt=PROMPT)
    gone = client.post(5, end=True, final=False)
    aborted = client.post(0, end=True, final=False)
    engine.gate.set()
    for replies in [*waiting, new, gone, aborted]:
        assert isinstance(replies.get(timeout=10), np.ndarray)
    assert closed[0] == 1  # after the batch that was running, before the others
    assert engine.batches == [[40], [1, 2, 3]]


def test_an_end_that_waits_behind_its_start_frees_the_stream(service, client, engine):
    waiting = queue_behind_a_running_chunk(client, engine, {})
    waiting += [client.post(5, start=True, prompt=PROMPT), client.post(5, end=True)]
    engine.gate.set()
    assert all(isinstance(replies.get(timeout=10), np.ndarray) for replies in waiting)
    assert service.stats().live_streams == 1


def test_a_later_segment_waits_for_listeners_with_less_audio(client, engine, clock):
    """Stream 1 begins while its listener still has three seconds of the segment before it."""
    client.start(2, [2] * 50)  # two seconds of audio
    waiting = queue_behind_a_running_chunk(client, engine, {})
    engine.batches.clear()
    waiting.append(client.post(1, [1] * 10, start=True, prompt=PROMPT, final=False, audio_left=3.0))
    waiting.append(client.post(2, [3] * 10, final=False))
    engine.gate.set()
    for replies in waiting:
        replies.get(timeout=10)
    assert engine.batches == [[40], [3, 1]]


def test_a_whole_utterance_needs_no_stream(service, client):
    audio = client.send(1, [7, 8], start=True, end=True, prompt=PROMPT)
    assert len(audio) == 4 * HOP_SAMPLES
    assert len(client.send(1, [7, 8], start=True, end=True, prompt=PROMPT, speed=2.0)) == 2 * HOP_SAMPLES
    assert service.stats().live_streams == 0


def test_a_stream_cannot_be_stretched(client):
    with pytest.raises(ValueError, match=r"speed 2\.0 is for whole utterances"):
        client.send(1, [4], start=True, prompt=PROMPT, speed=2.0)


def test_a_stream_without_a_voice_is_refused(client):
    with pytest.raises(ValueError, match="needs a voice"):
        client.send(1, [4], start=True)


def test_a_reply_that_raises_does_not_end_the_service(service, client):
    def broken(_):
        raise OSError("the receiver left")

    service.submit(Token2WavRequest("sequence 1", start=True, end=False, tokens=NO_TOKENS, prompt=PROMPT), broken)
    assert len(client.send(2, [4], start=True, prompt=PROMPT)) == 2 * HOP_SAMPLES


def test_closing_refuses_queued_and_new_requests(engine, clock):
    service = Token2WavService(engine, idle_seconds=5.0, clock=clock)
    client = Client(service)
    client.start(1)
    engine.gate.clear()
    engine.entered.clear()
    running = client.post(1, [4], final=False)
    assert engine.entered.wait(10)
    queued = client.post(1, [5], final=False)
    closing = threading.Thread(target=service.close)
    closing.start()
    engine.gate.set()
    closing.join(10)
    assert len(running.get(timeout=10))
    assert isinstance(queued.get(timeout=10), UnavailableError)
    with pytest.raises(UnavailableError, match="shutting down"):
        client.post(1, [4], final=False)
    assert service.stats().live_streams == 0


def test_an_engine_that_fails_its_warm_up_is_an_error_at_the_start(engine, clock):
    def broken():
        raise ValueError("not a checkpoint that speaks")

    engine.warm_up = broken
    with pytest.raises(ValueError, match="not a checkpoint that speaks"):
        Token2WavService(engine, idle_seconds=5.0, clock=clock)


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


def test_a_service_that_fails_replies_to_everybody_and_refuses_new_requests(service, client, engine):
    waiting = queue_behind_a_running_chunk(client, engine, {1: [1], 2: [15]})
    engine.gate.set()
    replies = [replies.get(timeout=10) for replies in waiting]
    assert [type(reply) for reply in replies] == [np.ndarray, FatalError, FatalError]
    with pytest.raises(FatalError, match="token2wav has failed"):
        client.post(3, start=True, prompt=PROMPT)
