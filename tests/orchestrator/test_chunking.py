"""The lengths of hops, and which streams begin with a short one."""

import random
from typing import Any

import pytest
from cosyvoice_triton.constants import FLOW_CHUNK_TOKENS, LOOKAHEAD_TOKENS, TOKEN_RATE
from cosyvoice_triton.orchestrator.chunking import WITHHELD_TOKENS, FirstHops, Hop, HopRules, HopSchedule, StreamOpening
from cosyvoice_triton.profiles import FirstHopNumbers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.waiting import Clock


def drain(schedule: HopSchedule, total: int) -> list[Hop]:
    """The hops of an utterance whose tokens are all available from the start."""
    hops = []
    while (hop := schedule.next_hop(total, ended=True)) is not None:
        hops.append(hop)
    return hops


def lengths(rules: HopRules, total: int, prompt_tokens: int = 0, **begin: Any) -> list[int]:
    return [hop.length for hop in drain(rules.schedule(prompt_tokens, **begin), total)]


def test_exponential_hops_double_up_to_the_cap_also_after_a_short_one_and_equal_ones_stay_the_same() -> None:
    assert lengths(HopRules(), 400) == [15, 30, 60, 100, 100, 95]
    assert lengths(HopRules(first_hop=15, short_first_hop=10), 400, short=True) == [10, 15, 30, 60, 100, 100, 85]
    assert lengths(HopRules(strategy="equal"), 70) == [15, 15, 15, 15, 10]


def test_a_first_hop_has_the_silent_tokens_of_the_onset_in_addition() -> None:
    rules = HopRules()
    assert lengths(rules, 400, 10, silent=1)[:3] == [16, 30, 60]
    assert rules.first_context(10, silent=1) == rules.first_context(None, silent=1) == 16 + LOOKAHEAD_TOKENS
    bounded = HopRules(boundary=FLOW_CHUNK_TOKENS)
    assert [bounded.first_length(prompt, silent=1) for prompt in (9, 10)] == [16, 40]


@pytest.mark.parametrize(("prompt_tokens", "expected"), [(15, [10, 25, 50]), (12, [13, 25, 50]), (16, [34, 25, 50])])
def test_with_a_boundary_a_short_first_hop_reaches_it(prompt_tokens: int, expected: list[int]) -> None:
    rules = HopRules(boundary=FLOW_CHUNK_TOKENS, short_first_hop=10)
    assert lengths(rules, 130, prompt_tokens, short=True)[:3] == expected
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
        (0.0, 1.0, [(0.05, 30, None), (0.05, 45, 45)]),  # 11 tokens are 0.44 s, nearly nine hops: one unit more
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
    end = hop.offset + hop.length
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
    ends = [hop.offset + hop.length for hop in hops]
    assert [hop.offset for hop in hops] == [0, *ends[:-1]] and ends[-1] == available
    assert all(hop.length >= (rules.short_first_hop if short and not before else first_hop) for hop in hops[:-1][:1])
    assert all(hop.length >= first_hop for hop in hops[1:-1])
    assert 1 <= hops[-1].length
    assert all((prompt_tokens + end) % boundary == 0 for end in ends[:-1])
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


RULES = HopRules(first_hop=15, short_first_hop=10)
AUDIO_SECONDS = (10 - WITHHELD_TOKENS) / TOKEN_RATE  # of a short first hop
FIRST, SECOND, FINAL = Hop(0, 15, final=False), Hop(15, 30, final=False), Hop(15, 30, final=True)


def begin(first_hops: FirstHops, *, played: bool = True, repeatable: bool = False) -> StreamOpening:
    return first_hops.open(played=played, repeatable=repeatable)


def speak(first_hops: FirstHops, seconds: float, **kind: bool) -> bool:
    """A stream whose second chunk comes after so many seconds: whether its first hop was short."""
    opening = begin(first_hops, **kind)
    first_hops.sent(opening, FIRST, 100.0)
    first_hops.sent(opening, SECOND, 100.0 + seconds)
    first_hops.sent(opening, SECOND, 200.0)
    first_hops.end(opening)
    return opening.short


def with_slack(rules: HopRules = RULES) -> FirstHops:
    first_hops = FirstHops(rules)
    for _ in range(4):
        assert not speak(first_hops, AUDIO_SECONDS - 0.05)
    return first_hops


def listen(slow: float, jitter: float, **numbers: float) -> tuple[float, float]:
    """The shares of 4,000 streams that begin with a short first hop, and that have a gap behind it.

    The server's load changes every 100 streams: of some of these periods the share `slow` of second chunks comes late.
    In the others they come when the audio has 0.06 seconds left, more or less `jitter`.
    """
    rng = random.Random(0)
    first_hops = FirstHops(RULES, FirstHopNumbers(**numbers))  # type: ignore[arg-type]  # some are counts
    short = gaps = 0
    for number in range(4000):
        loaded = number // 100 % 2
        late = loaded and rng.random() < slow
        seconds = AUDIO_SECONDS + 0.05 if late else AUDIO_SECONDS - 0.06 + jitter * rng.uniform(-1, 1)
        if speak(first_hops, seconds):
            short += 1
            gaps += seconds > AUDIO_SECONDS
    return short / 4000, gaps / 4000


def test_a_loaded_server_has_few_short_hops_that_end_in_a_gap_and_an_idle_one_has_many() -> None:
    """One early chunk of a loaded server is luck: with fewer streams measured, more listeners have a gap."""
    assert listen(0.0, 0.015) == (pytest.approx(1, abs=0.01), 0)
    _, gaps = listen(0.5, 0.015)
    _, with_fewer = listen(0.5, 0.015, measured_streams=1)
    assert gaps < 0.025 and with_fewer > 3 * gaps


def test_a_server_whose_chunks_barely_come_in_time_has_few_short_hops() -> None:
    """They vary: what has come just in time will come too late."""
    _, gaps = listen(0.0, 0.07)
    _, without_margin = listen(0.0, 0.07, margin_seconds=0.0)
    assert gaps < 0.02 and without_margin > 3 * gaps


def test_one_slow_stream_ends_it_until_it_is_forgotten() -> None:
    first_hops = with_slack()
    speak(first_hops, AUDIO_SECONDS - 0.03)
    assert [speak(first_hops, 0.1) for _ in range(5)] == [False] * 4 + [True]


def test_of_a_crowd_only_two_begin_so_and_others_follow_when_these_have_their_second_chunk() -> None:
    first_hops = with_slack()
    crowd = [begin(first_hops) for _ in range(5)]
    assert [opening.short for opening in crowd] == [True] * 2 + [False] * 3
    first_hops.sent(crowd[0], FIRST, 1.0)
    assert not begin(first_hops).short
    first_hops.sent(crowd[0], SECOND, 1.1)
    assert begin(first_hops).short


@pytest.mark.parametrize("chunks", [[], [FIRST], [FINAL], [FIRST, FINAL]], ids=["none", "one", "one, final", "two"])
def test_a_stream_that_ends_early_makes_room_and_is_not_measured(chunks: list[Hop]) -> None:
    first_hops = with_slack()
    for _ in range(8):
        opening = begin(first_hops)
        assert opening.short
        for chunk in chunks:
            first_hops.sent(opening, chunk, 1.0 + 10.0 * chunk.offset)
        first_hops.end(opening)
        first_hops.end(opening)


@pytest.mark.parametrize(("kind", "measured"), [({"played": False}, False), ({"repeatable": True}, True)])
def test_what_nobody_plays_and_what_is_repeatable_is_never_short_and_the_latter_is_measured(kind, measured) -> None:
    first_hops = FirstHops(RULES)
    for _ in range(4):
        speak(first_hops, 0.0, **kind)
    assert not begin(first_hops, **kind).short and begin(first_hops).short == measured
    first_hops = with_slack()
    speak(first_hops, 100.0, **kind)
    assert not begin(first_hops, **kind).short
    assert begin(first_hops).short != measured


@pytest.mark.parametrize(
    "rules", [HopRules(strategy="equal"), HopRules(first_hop=10, short_first_hop=10), HopRules(first_hop=8)]
)
def test_rules_without_a_short_first_hop(rules: HopRules) -> None:
    assert not begin(with_slack(rules)).short
