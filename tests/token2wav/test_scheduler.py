"""Which chunks are rendered next and together, and which listeners are admitted, with the batch costs of an H200
(tests/support/listeners.py)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from cosyvoice_triton.constants import TOKEN_RATE
from cosyvoice_triton.monitoring.metrics import LIMIT, LOAD
from cosyvoice_triton.profiles import H200, UNLIMITED, Profile
from cosyvoice_triton.token2wav.gpu.limits import Size, padding
from cosyvoice_triton.token2wav.policy.admission import Admission
from cosyvoice_triton.token2wav.policy.scheduler import FIRST_CHUNK_WORKER, Candidate, ChunkScheduler, Opening

from tests.support.listeners import HOPS, PADDED, UTTERANCE_SECONDS, Listeners, arrivals, batch_seconds

scheduler, numbers = ChunkScheduler(), H200.scheduler
patience, opens, worker_takes = scheduler.patience, scheduler.opens, scheduler.worker_takes
# Listeners at any moment without a gap and without admission, of the multiples of 64: 384 with an LLM at twice real
# time, 512 with one at 12 times.
CAPACITY = {50: 384, 300: 512}


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


def admission(times: float = 1, max_streams: int = 10_000) -> Admission:
    """What the service knows after it has measured a chunk alone and eight together, on a device so many times slower
    than an H200."""
    made, tokens = Admission(max_streams, H200.limits.dit_batch_tokens, 0.0), HOPS[0]
    for chunks in (1, 8):
        padded = PADDED(chunks, tokens)
        made.rendered(chunks, padded, chunks * tokens / TOKEN_RATE, times * batch_seconds(padded))
    return made


def test_without_admission_nobody_has_a_gap_at_capacity_and_nearly_all_have_at_twice_that() -> None:
    assert Listeners(arrivals(CAPACITY[50], 15.0), 50).simulate(25.0).without_gap() == 1
    assert Listeners(arrivals(2 * CAPACITY[50], 15.0), 50).simulate(25.0).without_gap() < 0.2


@pytest.mark.parametrize("token_rate", CAPACITY)
@pytest.mark.parametrize(("load", "least"), [(2, 0.995), (4, 0.97)])
def test_over_capacity_the_admitted_have_no_gaps_and_most_of_the_capacity_is_used(token_rate, load, least) -> None:
    most = CAPACITY[token_rate]
    served = Listeners(arrivals(load * most, 25.0), token_rate, admission=admission()).simulate(35.0)
    at_capacity = most * 25.0 / UTTERANCE_SECONDS
    assert served.without_gap() >= least
    assert len(served.admitted) > 0.7 * at_capacity
    assert len(served.refused) + len(served.admitted) == pytest.approx(load * at_capacity, rel=0.1)


@pytest.mark.parametrize(("pace", "counts"), [(0.5, 1), (1, 1), (1.3, 1.3), (2, 1.7), (4, 1.25), (20, 1.01)])
def test_a_stream_counts_for_more_than_it_hears_where_its_tokens_come_little_faster(pace: float, counts: float) -> None:
    """A faster LLM hardly lowers what rendering can serve."""
    paced, heard = admission(), admission()
    for second in range(400):
        paced.delivered(1.0, 1 / pace, 1.0, 0.0, float(second))
        heard.delivered(1.0, 1.0, 1.0, 0.0, float(second))
    for each in (paced, heard):
        each.update(1, [1.0], 400.0)
    assert heard.values()[LIMIT] / paced.values()[LIMIT] == pytest.approx(counts, rel=0.01)


@pytest.mark.parametrize("load", [2, 4])
def test_a_slow_device_that_serves_two_at_a_time_leaves_hardly_any_gaps_either(load: int) -> None:
    """25 times slower than an H200, as two CPU cores are: a first chunk takes 0.3 s."""
    begins = arrivals(load, 200.0)
    served = Listeners(begins, 300, cost=lambda tokens, _: 25 * batch_seconds(tokens), admission=admission(25))
    assert served.simulate(220.0).without_gap() > 0.9
    assert len(served.admitted) > 1.2 * 200.0 / UTTERANCE_SECONDS


@pytest.mark.parametrize("token_rate", CAPACITY)
def test_far_below_capacity_nobody_is_refused(token_rate: int) -> None:
    begins = arrivals(CAPACITY[token_rate] / 2, 30.0)
    assert not Listeners(begins, token_rate, admission=admission()).simulate(40.0).refused


def test_a_crowd_that_comes_within_a_second_is_not_admitted_as_a_whole() -> None:
    """Twice the capacity. When the first of them has a gap, all would have been admitted."""
    crowd = [index / 900 for index in range(900)]
    served = Listeners(crowd, 50, admission=admission()).simulate(20.0)
    assert served.without_gap() > 0.98 and len(served.admitted) > 90
    assert Listeners(crowd, 50).simulate(20.0).without_gap() < 0.1


def test_after_an_overload_nobody_is_refused_any_more() -> None:
    begins = arrivals(4 * CAPACITY[50], 15.0)
    calm = [20.0 + at for at in arrivals(200, 20.0, seed=1)]
    served = Listeners([*begins, *calm], 50, admission=admission()).simulate(50.0)
    assert served.refused and max(served.refused) < len(begins)


def test_a_slow_llm_is_found_out_by_its_listeners_and_what_it_can_serve_is_used() -> None:
    """It makes the tokens of 100 listeners, and rendering could serve four times as many; twice as many come."""
    served = Listeners(arrivals(200, 60.0), 300, admission=admission(), llm_rate=2500.0).simulate(70.0)
    assert served.without_gap() > 0.9
    assert len(served.admitted) > 0.99 * 100 * 60.0 / UTTERANCE_SECONDS
    assert Listeners(arrivals(200, 60.0), 300, llm_rate=2500.0).simulate(70.0).without_gap() < 0.3


def test_when_rendering_becomes_slower_fewer_are_admitted_and_later_as_many_as_before() -> None:
    """Another process takes half of the GPU from the 20th to the 35th second."""

    def cost(tokens: int, now: float) -> float:
        return batch_seconds(tokens) * (2.5 if 20 < now < 35 else 1.0)

    begins = arrivals(330, 80.0)
    served = Listeners(begins, 50, cost=cost, admission=admission()).simulate(90.0)
    gone = np.histogram([begins[stream] for stream in served.refused], bins=[0, 20, 35, 65, 80])[0]
    came = np.histogram(begins, bins=[0, 20, 35, 65, 80])[0]
    shares = gone / came
    assert shares[0] < 0.05 and shares[1] > 0.3 and shares[3] < 0.1, shares
    assert served.without_gap() > 0.85


def test_the_first_listener_is_always_admitted() -> None:
    """On a machine that cannot serve even one, and after a pause of any length."""
    slow = admission()
    for _ in range(50):
        slow.rendered(1, 18, 0.6, 5.0)
    for now in (0.0, 1.0, 3600.0):
        for _ in range(10):
            slow.delivered(-1.0, 0.1, 1.0, 1.0, now)
        slow.update(1, [-1.0], now)
        assert slow.ask(0, now) is None
        assert slow.ask(1, now) is not None


def test_unlimited_streams_are_refused_by_their_number_alone() -> None:
    slow = Admission(8, H200.limits.dit_batch_tokens, 0.0, Profile(admission=UNLIMITED))
    slow.rendered(1, 18, 0.6, 5.0)
    for _ in range(10):
        slow.delivered(-1.0, 0.1, 1.0, 1.0, 1.0)
    slow.update(7, [-1.0] * 7, 1.0)
    assert slow.ask(7, 1.0) is None
    refusal = slow.ask(8, 1.0)
    assert refusal is not None and refusal.reason == "streams"


def test_one_slow_chunk_refuses_nobody() -> None:
    calm = admission()
    calm.delivered(-1.0, 0.1, 1.0, 0.75, 10.0)
    calm.update(30, [1.0] * 30, 10.0)
    assert calm.ask(30, 10.0) is None


def test_listeners_whose_senders_have_left_refuse_nobody() -> None:
    """Those of an orchestrator that was killed, until their streams are freed."""
    calm = admission()
    calm.update(30, [1.0] * 20 + [-20.0] * 10, 100.0)
    assert calm.ask(30, 100.0) is None
    calm.update(30, [1.0] * 20 + [-1.0] * 10, 100.0)
    assert calm.ask(30, 100.0) is not None


def test_work_that_renders_no_chunks_is_taken_from_the_capacity() -> None:
    """New voices and whole utterances."""
    free, busy = admission(), admission()
    for second in range(1, 40):
        busy.prefilled(0.5)
        for each in (free, busy):
            each.update(10, [1.0] * 10, float(second))
    limits = [max(each.values().values()) for each in (free, busy)]
    assert limits[1] == pytest.approx(0.5 * limits[0], rel=0.15)


def test_a_refusal_names_the_listeners_the_rate_and_when_to_try_again() -> None:
    full = admission(max_streams=64)
    for second in range(1, 60):
        for _ in range(8):
            full.ended()
        full.update(64, [1.0] * 64, float(second))
    refusal = full.ask(64, 60.0)
    assert refusal is not None and refusal.reason == "streams" and refusal.retry_after == pytest.approx(1 / 8, rel=0.15)
    assert str(refusal) == "listeners: 64, 7.2 end each second; there is room for 64; try later or on another server"


def test_whole_utterances_are_refused_by_their_own_queue_alone() -> None:
    busy = admission(max_streams=4)
    assert busy.ask_whole(100) is None, "nothing is known of how long they take"
    for _ in range(3):
        busy.rendered_whole(0.5)
    assert busy.ask(9, 0.0) is not None
    assert busy.ask_whole(9) is None
    refusal = busy.ask_whole(10)
    assert refusal is not None and refusal.reason == "queue" and refusal.retry_after == pytest.approx(0.5)


def test_the_load_is_what_is_there_over_what_would_be_taken() -> None:
    busy = admission(max_streams=40)
    assert [busy.values(live)[LOAD] for live in (0, 10, 40, 41)] == [0, 0.25, 1, 1]
    for second in (1.0, 2.0, 3.0):
        busy.delivered(-1.0, 1.0, 1.0, 1.0, second)
    busy.update(20, [], 3.0)
    assert busy.ask(20, 3.0) is not None and busy.values(20)[LOAD] == 1, "gaps lower the limit"
    busy.rendered_whole(1.0)
    assert busy.ask_whole(4) is None and busy.values(0, 4)[LOAD] == 0.8
    assert busy.ask_whole(5) is not None and busy.values(0, 5)[LOAD] == 1


def test_three_chunks_that_nearly_came_too_late_within_two_seconds_are_an_overload() -> None:
    """One alone may be the host's fault, and those of longer ago are over."""
    for seconds, overloaded in ((0.7, True), (1.5, False)):
        admission = Admission(100, H200.limits.dit_batch_tokens, 0.0)
        for index in range(3):
            admission.delivered(audio_left=-0.2, awaited=0.1, speech=1.0, gap=0.0, now=10.0 + index * seconds)
        admission.update(40, [], now=10.0 + 2 * seconds)
        refusal = admission.ask(40, now=10.0 + 2 * seconds)
        assert (refusal is not None and refusal.reason == "gaps") == overloaded


def table() -> None:
    """Print the table of docs/results/operations.md."""
    for token_rate, most in CAPACITY.items():
        for load in (0.5, 1, 2, 4):
            begins = arrivals(load * most, 40.0)
            open_door = Listeners(begins, token_rate).simulate(60.0) if load < 4 else None
            served = Listeners(begins, token_rate, admission=admission()).simulate(60.0)
            before = f"{open_door.without_gap():.1%}" if open_door else ""
            listeners = len(served.admitted) * UTTERANCE_SECONDS / 40.0
            p95 = 1e3 * np.percentile(list(served.first.values()), 95)
            refused = len(served.refused) / len(begins)
            cells = (f"{token_rate / TOKEN_RATE:.0f} times", f"{load:g}", before, f"{served.without_gap():.1%}")
            print(f"| {' | '.join(cells)} | {refused:.0%} | {listeners:.0f} | {p95:.0f} ms |")


if __name__ == "__main__":
    table()
