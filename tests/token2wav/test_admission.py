"""Which listeners are admitted, with the batch costs of an H200 (tests/support/listeners.py)."""

import numpy as np
import pytest
from cosyvoice_triton.constants import TOKEN_RATE
from cosyvoice_triton.monitoring.metrics import LIMIT, LOAD
from cosyvoice_triton.profiles import H200, UNLIMITED, Profile
from cosyvoice_triton.token2wav.policy.admission import Admission

from tests.support.listeners import HOPS, PADDED, UTTERANCE_SECONDS, Listeners, arrivals, batch_seconds

# Listeners at any moment without a gap and without admission, of the multiples of 64: 384 with an LLM at twice real
# time, 512 with one at 12 times.
CAPACITY = {50: 384, 300: 512}


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
