"""Which chunks are rendered next and together."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from cosyvoice_triton.profiles import H200
from cosyvoice_triton.token2wav.gpu.limits import Size, padding
from cosyvoice_triton.token2wav.policy.scheduler import FIRST_CHUNK_WORKER, Candidate, ChunkScheduler, Opening

from tests.support.listeners import Listeners, arrivals, batch_seconds

scheduler, numbers = ChunkScheduler(), H200.scheduler
patience, opens, worker_takes = scheduler.patience, scheduler.opens, scheduler.worker_takes


def pick(
    waiting: list[Candidate], max_chunks: int = 64, max_tokens: int = 1600, sizes: Sequence[Size] = ()
) -> list[int]:
    """Padded to the longest chunk, or to the sizes of graphs."""
    return scheduler.pick(waiting, max_chunks, max_tokens, padding(sizes))


def chunk(*, audio_left: float | None = None, tokens: int | None = 15, arrived: int = 0) -> Candidate:
    return Candidate(audio_left, arrived, tokens)


def test_first_chunks_come_first_then_who_runs_out_of_audio_first_then_arrival() -> None:
    waiting = [
        chunk(audio_left=0.9),
        chunk(audio_left=0.3),
        chunk(arrived=8),
        chunk(arrived=7),
        chunk(audio_left=0.3, arrived=-1),
    ]
    assert pick(waiting) == [3, 2, 4, 1, 0]


def test_a_few_chunks_of_any_lengths_share_a_batch() -> None:
    """The fixed cost of a batch is 300 tokens."""
    waiting = [chunk(tokens=15), chunk(tokens=100, arrived=1), chunk(tokens=50, arrived=2)]
    assert pick(waiting, max_tokens=300) == [0, 1, 2]
    assert pick(waiting, max_tokens=199) == [0, 2]


def test_a_chunk_does_not_join_if_padding_costs_more_than_it_saves() -> None:
    long = [chunk(tokens=100, arrived=stream) for stream in range(8)]
    assert pick([*long, chunk(tokens=7, arrived=8)]) == list(range(8))
    short = [chunk(tokens=18, arrived=stream) for stream in range(8)]
    assert pick([*short, chunk(tokens=100, arrived=8)]) == list(range(8))


def test_a_batch_is_filled_to_the_size_of_a_graph() -> None:
    """Five chunks would compute eight rows."""
    sizes = [(rows, frames) for rows in (1, 4, 8) for frames in (32, 208)]
    waiting = [chunk(tokens=100, arrived=stream) for stream in range(8)]
    assert [len(pick(waiting[:count], sizes=sizes)) for count in range(1, 9)] == [1, 2, 3, 4, 4, 4, 7, 8]


def test_chunks_of_a_length_share_a_batch_although_a_shorter_one_is_more_urgent_than_some() -> None:
    """The most urgent is always in; those it would be padded to come next."""
    sizes = [(rows, frames) for rows in (1, 2, 4, 8) for frames in (32, 208)]
    long = [chunk(audio_left=2.0, tokens=100, arrived=stream) for stream in range(4)]
    short = [chunk(audio_left=1.9, tokens=15)]
    assert pick([*long, *short], sizes=sizes) == [4, 0, 1, 2]
    later = [chunk(audio_left=2.1, tokens=15)]
    assert pick([*long, *later], sizes=sizes) == [0, 1, 2, 3]
    shorts = [chunk(audio_left=1.9, tokens=15, arrived=stream) for stream in range(4)]
    assert pick([*long, *shorts], max_tokens=300, sizes=sizes) == [4, 5, 6, 7]


def test_chunks_that_are_shorter_than_the_most_urgent_one_wait_if_others_of_its_length_fill_the_batch() -> None:
    """For a batch of their own, of which the next most urgent one is then the first."""
    sizes = [(B, T) for B in (1, 2, 4, 8) for T in (64, 208)]
    waiting = [chunk(audio_left=0.05 * row, tokens=30 if row % 2 else 100) for row in range(16)]
    assert pick(waiting, max_tokens=832, sizes=sizes) == [0, 2, 4, 6, 8, 10, 12, 14]
    left = [each for each in waiting if each.tokens == 30]
    assert pick(left, max_tokens=832, sizes=sizes) == [*range(8)]
    few = [chunk(audio_left=0.1 * row, tokens=30 if row else 100) for row in range(4)]
    assert pick(few, max_tokens=832, sizes=sizes) == [0, 1, 2, 3]  # all share the fixed cost


def test_the_worker_of_first_chunks_and_that_of_all_others_take_their_own() -> None:
    start, whole = chunk()._replace(first=True), chunk(audio_left=0.1, tokens=None)
    waiting = [start, chunk(audio_left=1.0), start, whole, chunk(audio_left=0.2)]
    assert worker_takes(FIRST_CHUNK_WORKER, 2, waiting) == [0, 2]
    assert worker_takes(0, 2, waiting) == [1, 3, 4]
    assert worker_takes(0, 2, [start, start]) == [0, 1]  # it helps where there is nothing else to do
    assert worker_takes(0, 1, waiting) == [*range(5)]


def test_while_a_crowd_waits_first_chunks_do_until_they_fill_a_batch_or_one_has_waited_long() -> None:
    start = chunk()._replace(first=True)
    crowd = [chunk(audio_left=1.0, arrived=stream) for stream in range(numbers.crowd_chunks)]
    few = [start] * (numbers.first_chunk_batch - 1)
    assert worker_takes(FIRST_CHUNK_WORKER, 2, [*crowd, *few]) == []
    assert worker_takes(FIRST_CHUNK_WORKER, 2, [*few, start, *crowd]) == [*range(numbers.first_chunk_batch)]
    long = start._replace(waited=numbers.gather_seconds)
    assert worker_takes(FIRST_CHUNK_WORKER, 2, [start, long, *crowd]) == [0, 1]
    assert worker_takes(FIRST_CHUNK_WORKER, 2, [start, *crowd[1:]]) == [0]
    wholes = [chunk(tokens=None)] * numbers.crowd_chunks
    assert worker_takes(FIRST_CHUNK_WORKER, 2, [start, *wholes, *crowd[1:]]) == [0], "what is served alone is no crowd"
    assert worker_takes(0, 2, [start, *crowd]) == [*range(1, 1 + numbers.crowd_chunks)]


def test_requests_without_a_chunk_are_served_alone() -> None:
    waiting = [chunk(tokens=None), chunk(), chunk(tokens=None)]
    assert pick(waiting) == [0]
    assert pick(waiting[1:]) == [0]


def test_a_batch_is_bounded_in_tokens_but_never_empty() -> None:
    waiting = [chunk(tokens=100, arrived=stream) for stream in range(4)]
    assert pick(waiting, max_tokens=250) == [0, 1]
    assert pick(waiting, max_tokens=10) == [0]


def test_a_first_chunk_is_not_held_up_by_chunks_that_could_wait() -> None:
    """Sixteen listeners have plenty of audio left: few of them join the batch of a new stream, and without one the
    batch stays short for the stream that may begin next. Listeners who are about to run out get a full batch."""
    idle = [chunk(audio_left=4.0, tokens=100, arrived=stream) for stream in range(16)]
    assert pick([*idle, chunk(arrived=16)]) == [16, 0, 1, 2]
    assert pick(idle) == list(range(8))
    late = [chunk(audio_left=0.2, tokens=100, arrived=stream) for stream in range(16)]
    assert pick(late) == list(range(16))
    assert pick([*late[:8], *idle[8:]]) == list(range(8))


def start(voice: bytes, *, frames: int = 250, audio_left: float | None = None, arrived: int = 0) -> Opening:
    return Opening(voice, frames, audio_left, arrived)


def test_new_voices_are_prefilled_together_as_far_as_their_padded_prompts_fit() -> None:
    waiting = [start(b"%d" % voice, frames=200 + 50 * voice, arrived=voice) for voice in range(4)]
    assert opens(waiting, [], max_frames=2048, free=64) == [0, 1, 2, 3]
    assert opens(waiting, [], max_frames=3 * 300, free=64) == [0, 1, 2]
    assert opens(waiting, [], max_frames=10, free=64) == [0]


def test_one_voice_at_a_time_is_prefilled_while_a_listener_is_nearly_dry() -> None:
    waiting = [start(b"%d" % voice, arrived=voice) for voice in range(32)]
    assert opens(waiting, [5.0, 0.2], max_frames=4096, free=64) == [0]
    assert opens(waiting, [5.0, None, -2.0], max_frames=4096, free=64) == [0]
    assert len(opens(waiting, [5.0, None], max_frames=4096, free=64)) == 16


def test_starts_that_need_no_prefill_of_their_own_are_never_held_back() -> None:
    """The voice of the second is known, that of the third is prefilled for the first."""
    waiting = [start(b"a"), start(b"b", frames=0, arrived=1), start(b"a", arrived=2), start(b"c", arrived=3)]
    assert opens(waiting, [0.1], max_frames=4096, free=64) == [0, 1, 2]


def test_a_whole_utterance_is_as_urgent_as_a_listener_who_is_nearly_dry_at_most() -> None:
    assert [patience(waited) for waited in (0.0, 4.0, 5.0, 60.0)] == [5.0, 1.0, 0.25, 0.25]


def test_the_start_of_a_later_segment_comes_after_those_of_listeners_without_audio() -> None:
    waiting = [start(b"a", audio_left=3.0), start(b"b", audio_left=0.5, arrived=1), start(b"c", arrived=2)]
    assert opens(waiting, [], max_frames=4096, free=64) == [2, 1, 0]
    assert opens(waiting, [0.0], max_frames=4096, free=64) == [2]


def test_a_later_segment_gets_a_slot_before_new_listeners() -> None:
    """They would take it between two segments of a text, as long as new ones arrive."""
    waiting = [start(b"a"), start(b"b", frames=0, audio_left=3.0, arrived=1), start(b"c", arrived=2)]
    assert [opens(waiting, [], max_frames=4096, free=free) for free in range(4)] == [[], [1], [1, 0], [0, 2, 1]]


@pytest.mark.parametrize(
    ("count", "token_rate", "slower", "most_ms"), [(256, 300, 1.5, 170), (320, 300, 1.2, 140), (320, 50, 1.0, 110)]
)
def test_hundreds_of_listeners_have_no_gap(count, token_rate, slower, most_ms) -> None:
    """An LLM far ahead of the listeners, whose GPU it shares; one that is hardly ahead. Where batches mix lengths
    whatever it costs, more than half of the first two's utterances have gaps, for all that is computed as padding."""
    listeners = Listeners(arrivals(count, 40.0), token_rate, cost=lambda tokens, now: slower * batch_seconds(tokens))
    listeners.simulate(50.0)
    assert len(listeners.first) == len(listeners.admitted) and listeners.without_gap() == 1
    assert np.percentile(list(listeners.first.values()), 95) < most_ms / 1e3


def apart(count: int, gather_seconds: float = numbers.gather_seconds) -> tuple[float, float]:
    """The share of listeners without a gap, and the 95th percentile of first chunks in seconds, where these have a
    worker of their own."""
    changed = ChunkScheduler(replace(numbers, gather_seconds=gather_seconds))
    listeners = Listeners(arrivals(count, 20.0), 300, workers=2, scheduler=changed).simulate(30.0)
    return listeners.without_gap(), float(np.percentile(list(listeners.first.values()), 95))


def test_first_chunks_that_are_gathered_leave_the_gpu_to_a_crowd() -> None:
    """Rendered as they come, they are sooner, and take so much of the GPU that most of 512 listeners have a gap."""
    without_gap, first = apart(512)
    assert without_gap == 1 and first < 0.14
    without_gap, first = apart(512, gather_seconds=0.0)
    assert without_gap < 0.5 and first < 0.06


def test_without_a_crowd_first_chunks_wait_for_no_others() -> None:
    without_gap, first = apart(192)
    assert without_gap == 1 and first < 0.06
