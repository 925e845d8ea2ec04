import pytest
from cosyvoice_triton.constants import FLOW_CHUNK_TOKENS, LOOKAHEAD_TOKENS
from cosyvoice_triton.orchestrator.chunking import Hop, HopRules, HopSchedule
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.waiting import Clock


def drain(schedule: HopSchedule, total: int) -> list[Hop]:
    """The hops of an utterance whose tokens are all available from the start."""
    hops = []
    while (hop := schedule.next_hop(total, ended=True)) is not None:
        hops.append(hop)
    return hops


def lengths(rules: HopRules, total: int, prompt_tokens: int = 0) -> list[int]:
    return [hop.length for hop in drain(rules.schedule(prompt_tokens), total)]


def test_exponential_hops_double_up_to_the_cap_and_equal_ones_stay_the_same() -> None:
    assert lengths(HopRules(), 400) == [15, 30, 60, 100, 100, 95]
    assert lengths(HopRules(strategy="equal"), 70) == [15, 15, 15, 15, 10]


def test_after_a_short_first_hop_the_doubling_starts_at_the_first_hop() -> None:
    schedule = HopRules(first_hop=15, short_first_hop=10).schedule(0, short=True)
    assert [hop.length for hop in drain(schedule, 400)] == [10, 15, 30, 60, 100, 100, 85]


def test_a_first_hop_has_the_silent_tokens_of_the_onset_in_addition() -> None:
    rules = HopRules()
    assert [hop.length for hop in drain(rules.schedule(10, silent=1), 400)][:3] == [16, 30, 60]
    assert rules.first_context(10, silent=1) == rules.first_context(None, silent=1) == 16 + LOOKAHEAD_TOKENS
    bounded = HopRules(boundary=FLOW_CHUNK_TOKENS)
    assert [bounded.first_length(prompt, silent=1) for prompt in (9, 10)] == [16, 40]


@pytest.mark.parametrize(("prompt_tokens", "expected"), [(15, [10, 25, 50]), (12, [13, 25, 50]), (16, [34, 25, 50])])
def test_with_a_boundary_a_short_first_hop_reaches_it(prompt_tokens: int, expected: list[int]) -> None:
    rules = HopRules(boundary=FLOW_CHUNK_TOKENS, short_first_hop=10)
    assert [hop.length for hop in drain(rules.schedule(prompt_tokens, short=True), 130)][:3] == expected
    assert rules.first_context(prompt_tokens, short=True) == expected[0] + LOOKAHEAD_TOKENS
    assert rules.first_context(None, short=True) == 34 + LOOKAHEAD_TOKENS


@pytest.mark.parametrize(("prompt_tokens", "first"), [(0, 25), (10, 15), (11, 39), (25, 25), (99, 26)])
def test_with_a_boundary_the_first_hop_reaches_it_and_doubling_starts_at_one_flow_chunk(prompt_tokens, first) -> None:
    rules = HopRules(boundary=FLOW_CHUNK_TOKENS)
    assert lengths(rules, first + 25 + 50 + 100 + 100 + 7, prompt_tokens) == [first, 25, 50, 100, 100, 7]
    assert rules.first_context(prompt_tokens) == first + 3 <= rules.first_context(None) == 42


@pytest.mark.parametrize(
    ("segments", "boundary", "expected"),
    [
        ([20, 200, 150], 1, [[15, 5], [15, 30, 60, 95], [100, 50]]),
        ([95, 120], 1, [[15, 30, 50], [60, 60]]),
        ([40, 300], FLOW_CHUNK_TOKENS, [[15, 25], [15, 50, 100, 100, 35]]),  # a prompt of 10 tokens
        ([212, 130], FLOW_CHUNK_TOKENS, [[15, 25, 50, 100, 22], [90, 40]]),
    ],
)
def test_later_segments_begin_with_a_hop_of_at_most_what_was_spoken_before(segments, boundary, expected) -> None:
    schedule = HopRules(boundary=boundary).schedule(10)
    found = []
    for index, total in enumerate(segments):
        if index:
            schedule.begin_segment()
        found.append([hop.length for hop in drain(schedule, total)])
    assert found == expected


def test_the_final_hop_takes_the_tokens_that_have_no_look_ahead_after_them() -> None:
    assert drain(HopRules().schedule(0), 0) == []
    assert drain(HopRules().schedule(0), 17) == [Hop(0, 17, final=True)]
    assert drain(HopRules().schedule(0), 18) == [Hop(0, 15, final=False), Hop(15, 3, final=True)]
    assert drain(HopRules().schedule(0), 1) == [Hop(0, 1, final=True)]


@pytest.mark.parametrize(
    ("cut", "speed", "asked"),  # (time, tokens ready after those of the hops before, length of the next hop or None)
    [
        (
            0.0,
            1.0,
            [(0.05, 30, None), (0.05, 45, 45)],
        ),  # 11 tokens are 0.44 s, nearly nine hops: one unit more
        (0.0, 1.0, [(0.05, 30, None), (0.45, 30, 30)]),  # the listener has little left
        (0.0, 1.0, [(0.4, 40, 30), (1.6, 77, 75)]),  # rendering is slow: all that is ready
        (0.3, 1.0, [(0.05, 30, 30)]),  # of the 0.44 s few are heard
        (0.0, 3.0, [(0.05, 30, 30)]),  # they are 0.15 s
    ],
)
def test_time_based_waits_for_one_more_unit_while_the_listener_has_enough_audio(cut, speed, asked) -> None:
    clock = Clock(0.0)
    schedule = HopRules(strategy="time_based").schedule(0, clock, speed=speed)
    hop = schedule.next_hop(18, ended=False)
    assert hop == Hop(0, 15, final=False)
    schedule.cut(cut)
    end = hop.end
    for clock.now, ready, length in asked:
        hop = schedule.next_hop(end + ready + LOOKAHEAD_TOKENS, ended=False)
        assert hop == (None if length is None else Hop(end, length, final=False))
        end += length or 0


@settings(deadline=None)
@given(
    strategy=st.sampled_from(["exponential", "equal", "time_based"]),
    boundary=st.sampled_from([1, FLOW_CHUNK_TOKENS]),
    first_hop=st.integers(5, 60),
    short=st.booleans(),
    prompt_tokens=st.integers(0, 800),
    before=st.integers(0, 300),
    arrivals=st.lists(st.tuples(st.integers(1, 120), st.floats(0, 2)), min_size=1, max_size=60),
)
def test_every_token_is_rendered_once_and_in_order_whenever_it_arrives(
    strategy: str,
    boundary: int,
    first_hop: int,
    short: bool,
    prompt_tokens: int,
    before: int,
    arrivals: list[tuple[int, float]],
) -> None:
    """In the first segment of a text, or after one of `before` tokens."""
    clock = Clock(0.0)
    rules = HopRules(strategy=strategy, boundary=boundary, first_hop=first_hop)

    def after_a_segment(schedule: HopSchedule) -> HopSchedule:
        if drain(schedule, before):
            schedule.begin_segment()
        return schedule

    short = short and rules.has_short_first_hop
    schedule = after_a_segment(rules.schedule(prompt_tokens, clock, short=short))
    hops: list[Hop] = []
    available = 0
    for tokens, wait in arrivals:
        available += tokens
        clock.now += wait
        while (hop := schedule.next_hop(available, ended=False)) is not None:
            assert hop.end_of_context <= available
            hops.append(hop)
            clock.now += wait / 2
    hops += drain(schedule, available)

    assert [hop.final for hop in hops] == [False] * (len(hops) - 1) + [True]
    assert [hop.offset for hop in hops] == [0, *(hop.end for hop in hops[:-1])]
    assert hops[-1].end == available
    assert all(hop.length >= (rules.short_first_hop if short and not before else first_hop) for hop in hops[:-1][:1])
    assert all(hop.length >= first_hop for hop in hops[1:-1])
    assert 1 <= hops[-1].length
    assert all((prompt_tokens + hop.end) % boundary == 0 for hop in hops[:-1])
    assert all(hop.length <= rules.max_hop for hop in hops[1:-1])
    if strategy != "time_based":
        assert hops == drain(after_a_segment(rules.schedule(prompt_tokens, short=short)), available)


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"strategy": "fastest"}, "'fastest'"),
        ({"first_hop": 4}, "first hop of 4"),
        ({"short_first_hop": 4}, "first hop of 4"),
        ({"max_hop": 14}, "largest hop of 14"),
        ({"max_hop": 60, "boundary": FLOW_CHUNK_TOKENS}, "largest hop of 60"),
    ],
)
def test_invalid_rules_are_an_error_naming_the_value(settings: dict[str, object], value: str) -> None:
    with pytest.raises(ValueError, match=value):
        HopRules(**settings)
