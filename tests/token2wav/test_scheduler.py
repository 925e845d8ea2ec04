"""Which chunks are rendered next and together."""

import heapq
import itertools
import random

import numpy as np
import pytest

from common.constants import LOOKAHEAD_TOKENS, TOKEN_RATE
from common.token2wav.scheduler import Candidate, Start, pick, starts


def chunk(stream: int, *, audio_left: float | None = None, tokens: int | None = 15, arrived: int = 0) -> Candidate:
    return Candidate(stream, audio_left, arrived, tokens)


def test_first_chunks_come_first_then_who_runs_out_of_audio_first_then_arrival() -> None:
    waiting = [
        chunk(0, audio_left=0.9),
        chunk(1, audio_left=0.3),
        chunk(2, arrived=8),
        chunk(3, arrived=7),
        chunk(4, audio_left=0.3, arrived=-1),
    ]
    assert pick(waiting, max_chunks=64, max_tokens=1600) == [3, 2, 4, 1, 0]


def test_a_batch_holds_the_most_urgent_up_to_its_limit() -> None:
    waiting = [chunk(stream, audio_left=10.0 - stream) for stream in range(5)]
    assert pick(waiting, max_chunks=2, max_tokens=1600) == [4, 3]


def test_a_few_chunks_of_any_lengths_share_a_batch() -> None:
    """The fixed cost of a batch is 300 tokens."""
    waiting = [chunk(0, tokens=15), chunk(1, tokens=100, arrived=1), chunk(2, tokens=50, arrived=2)]
    assert pick(waiting, max_chunks=64, max_tokens=300) == [0, 1, 2]
    assert pick(waiting, max_chunks=64, max_tokens=199) == [0, 2]


def test_a_chunk_does_not_join_if_padding_costs_more_than_it_saves() -> None:
    long = [chunk(stream, tokens=100, arrived=stream) for stream in range(8)]
    assert pick([*long, chunk(8, tokens=7, arrived=8)], max_chunks=64, max_tokens=1600) == list(range(8))
    short = [chunk(stream, tokens=18, arrived=stream) for stream in range(8)]
    assert pick([*short, chunk(8, tokens=100, arrived=8)], max_chunks=64, max_tokens=1600) == list(range(8))


def test_requests_without_a_chunk_are_served_alone() -> None:
    waiting = [chunk(0, tokens=None), chunk(1), chunk(2, tokens=None)]
    assert pick(waiting, max_chunks=64, max_tokens=1600) == [0]
    assert pick(waiting[1:], max_chunks=64, max_tokens=1600) == [0]


def test_the_requests_of_a_stream_are_served_in_order() -> None:
    """The second chunk of stream 1 waits, even if the first does not fit or is no chunk."""
    assert pick([chunk(0), chunk(1, arrived=1), chunk(1, arrived=2)], max_chunks=64, max_tokens=1600) == [0, 1]
    assert pick([chunk(0), chunk(1, tokens=90, arrived=1), chunk(1, arrived=2)], max_chunks=64, max_tokens=100) == [0]
    assert pick([chunk(0), chunk(1, tokens=None, arrived=1), chunk(1, arrived=2)], max_chunks=64, max_tokens=1600) == [
        0
    ]


def test_a_batch_is_bounded_in_tokens_but_never_empty() -> None:
    waiting = [chunk(stream, tokens=100, arrived=stream) for stream in range(4)]
    assert pick(waiting, max_chunks=64, max_tokens=250) == [0, 1]
    assert pick(waiting, max_chunks=64, max_tokens=10) == [0]


def test_a_first_chunk_is_not_held_up_by_chunks_that_could_wait() -> None:
    """Sixteen listeners have plenty of audio left: few of them join the batch of a new stream, and without one the
    batch stays short for the stream that may begin next. Listeners who are about to run out get a full batch."""
    idle = [chunk(stream, audio_left=4.0, tokens=100, arrived=stream) for stream in range(16)]
    assert pick([*idle, chunk(16, arrived=16)], max_chunks=64, max_tokens=1600) == [16, 0, 1, 2]
    assert pick(idle, max_chunks=64, max_tokens=1600) == [0, 1, 2, 3]
    late = [chunk(stream, audio_left=0.2, tokens=100, arrived=stream) for stream in range(16)]
    assert pick(late, max_chunks=64, max_tokens=1600) == list(range(16))
    assert pick([*late[:8], *idle[8:]], max_chunks=64, max_tokens=1600) == list(range(8))


def start(voice: bytes, *, frames: int = 250, audio_left: float | None = None, arrived: int = 0) -> Start:
    return Start(voice, frames, audio_left, arrived)


def test_new_voices_are_prefilled_together_as_far_as_their_padded_prompts_fit() -> None:
    waiting = [start(b"%d" % voice, frames=200 + 50 * voice, arrived=voice) for voice in range(4)]
    assert starts(waiting, [], max_frames=2048, free=64) == [0, 1, 2, 3]
    assert starts(waiting, [], max_frames=3 * 300, free=64) == [0, 1, 2]
    assert starts(waiting, [], max_frames=10, free=64) == [0]


def test_one_voice_at_a_time_is_prefilled_while_a_listener_is_nearly_dry() -> None:
    waiting = [start(b"%d" % voice, arrived=voice) for voice in range(32)]
    assert starts(waiting, [5.0, 0.2], max_frames=4096, free=64) == [0]
    assert starts(waiting, [5.0, None, -2.0], max_frames=4096, free=64) == [0]
    assert len(starts(waiting, [5.0, None], max_frames=4096, free=64)) == 16


def test_starts_that_need_no_prefill_of_their_own_are_never_held_back() -> None:
    """The voice of the second is known, that of the third is prefilled for the first."""
    waiting = [start(b"a"), start(b"b", frames=0, arrived=1), start(b"a", arrived=2), start(b"c", arrived=3)]
    assert starts(waiting, [0.1], max_frames=4096, free=64) == [0, 1, 2]


def test_the_start_of_a_later_segment_comes_after_those_of_listeners_without_audio() -> None:
    waiting = [start(b"a", audio_left=3.0), start(b"b", audio_left=0.5, arrived=1), start(b"c", arrived=2)]
    assert starts(waiting, [], max_frames=4096, free=64) == [2, 1, 0]
    assert starts(waiting, [0.0], max_frames=4096, free=64) == [2]


def test_a_later_segment_gets_a_slot_before_new_listeners() -> None:
    """They would take it between two segments of a text, as long as new ones arrive."""
    waiting = [start(b"a"), start(b"b", frames=0, audio_left=3.0, arrived=1), start(b"c", arrived=2)]
    assert [starts(waiting, [], max_frames=4096, free=free) for free in range(4)] == [[], [1], [1, 0], [0, 2, 1]]


class Listeners:
    """Clients that play utterances of 212 tokens to the end before the next request, in front of a token2wav as fast as
    the one measured on an H200 next to an LLM (docs/results/token2wav.md). Events in order of time; no clock is read.
    """

    HOPS = (15, 30, 60, 100, 7)
    PLAYER_SECONDS = 0.25  # a player's buffer, as in docs/results/token2wav.md
    WITHHELD = 4  # tokens of the first chunk that are played with the second

    def __init__(self, count: int, token_rate: float, slower: float) -> None:
        self.rate, self.slower = token_rate, slower
        self.order = itertools.count()
        self.events: list[tuple[float, int, str, int]] = []
        self.waiting: list[tuple[int, int]] = []  # stream and number of arrival
        self.first: list[float] = []  # latencies
        self.gaps: list[float] = []  # the worst of each utterance
        self.begun, self.chunk, self.played_until, self.requested = (
            [0.0] * count,
            [0] * count,
            [0.0] * count,
            [0.0] * count,
        )
        self.worst = [0.0] * count
        spread = random.Random(0)
        for stream in range(count):
            self._at(spread.uniform(0, 8), "begin", stream)

    def simulate(self, seconds: float) -> None:
        batch: list[int] = []
        while True:
            now, _, event, stream = heapq.heappop(self.events)
            if now > seconds:
                return
            if event == "begin":
                self.begun[stream], self.chunk[stream], self.worst[stream] = now, 0, 0.0
                self._await_tokens(now, stream)
            elif event == "request":
                self.requested[stream] = now
                self.waiting.append((stream, next(self.order)))
            else:
                for stream in batch:
                    self._receive(now, stream)
                batch = []
            if self.waiting and not batch:
                batch = self._next(now)

    def _next(self, now: float) -> list[int]:
        chunks = [Candidate(stream, self._left(now, stream), at, self._tokens(stream)) for stream, at in self.waiting]
        chosen = pick(chunks, max_chunks=64, max_tokens=1600)
        padded = len(chosen) * max(self._tokens(self.waiting[index][0]) for index in chosen)
        self._at(now + self.slower * (0.012 + 42e-6 * padded), "done", -1)
        batch = [self.waiting[index][0] for index in chosen]
        self.waiting = [each for each in self.waiting if each[0] not in batch]
        return batch

    def _receive(self, now: float, stream: int) -> None:
        seconds = self.HOPS[self.chunk[stream]] / TOKEN_RATE
        if self.chunk[stream] == 0:
            self.first.append(now - self.requested[stream])
            self.played_until[stream] = now + seconds - self.WITHHELD / TOKEN_RATE
        else:
            self.worst[stream] = max(self.worst[stream], now - self.played_until[stream] - self.PLAYER_SECONDS)
            self.played_until[stream] += seconds
        self.chunk[stream] += 1
        if self.chunk[stream] == len(self.HOPS):
            self.gaps.append(self.worst[stream])
            self._at(max(now, self.played_until[stream]), "begin", stream)
        else:
            self._await_tokens(now, stream)

    def _await_tokens(self, now: float, stream: int) -> None:
        tokens = sum(self.HOPS[: self.chunk[stream]]) + self._tokens(stream)
        self._at(max(now, self.begun[stream] + tokens / self.rate), "request", stream)

    def _tokens(self, stream: int) -> int:
        hop = self.HOPS[self.chunk[stream]]
        return hop if hop == self.HOPS[-1] else hop + LOOKAHEAD_TOKENS

    def _left(self, now: float, stream: int) -> float | None:
        return None if self.chunk[stream] == 0 else self.played_until[stream] - now

    def _at(self, time: float, event: str, stream: int) -> None:
        heapq.heappush(self.events, (time, next(self.order), event, stream))


@pytest.mark.parametrize(
    ("count", "token_rate", "slower", "most_ms"), [(256, 300, 1.5, 170), (320, 300, 1.2, 140), (320, 50, 1.0, 110)]
)
def test_hundreds_of_listeners_have_no_gap(count, token_rate, slower, most_ms) -> None:
    """An LLM far ahead of the listeners, whose GPU it shares; one that is hardly ahead. Where batches mix lengths
    whatever it costs, more than half of the first two's utterances have gaps, for all that is computed as padding."""
    listeners = Listeners(count, token_rate, slower)
    listeners.simulate(40.0)
    assert max(listeners.gaps) <= 0
    assert np.percentile(listeners.first, 95) < most_ms / 1e3
