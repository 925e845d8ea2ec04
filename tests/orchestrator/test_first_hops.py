"""Which streams begin with a short first hop."""

import pytest
from cosyvoice_triton.constants import TOKEN_RATE
from cosyvoice_triton.orchestrator.chunking import WITHHELD_TOKENS, Hop, HopRules
from cosyvoice_triton.orchestrator.first_hops import MARGIN_SECONDS, MEASURED, MOST_AT_ONCE, FirstHops, StreamStart

RULES = HopRules(first_hop=15, short_first_hop=10)
LIMIT = (10 - WITHHELD_TOKENS) / TOKEN_RATE - MARGIN_SECONDS
FIRST, SECOND, FINAL = Hop(0, 15, final=False), Hop(15, 30, final=False), Hop(15, 30, final=True)


def begin(first_hops: FirstHops, *, heard: bool = True, repeatable: bool = False) -> StreamStart:
    return first_hops.start(heard=heard, repeatable=repeatable)


def speak(first_hops: FirstHops, seconds: float, **kind: bool) -> bool:
    """A stream whose second chunk comes after so many seconds: whether its first hop was short."""
    start = begin(first_hops, **kind)
    start.sent(FIRST, 100.0)
    start.sent(SECOND, 100.0 + seconds)
    start.sent(SECOND, 200.0)
    start.end()
    return start.short


def with_slack(rules: HopRules = RULES) -> FirstHops:
    first_hops = FirstHops(rules)
    for _ in range(MEASURED):
        assert not speak(first_hops, LIMIT - 0.001)
    return first_hops


def test_the_first_hop_is_short_once_four_streams_had_slack() -> None:
    """One or two may have been lucky."""
    first_hops = FirstHops(RULES)
    assert [speak(first_hops, 0.0) for _ in range(5)] == [False] * 4 + [True]


@pytest.mark.parametrize(("left", "short"), [(0.05, True), (0.03, False)])
def test_a_player_without_a_buffer_must_have_40_ms_left_when_the_second_chunk_comes(left: float, short: bool) -> None:
    first_hops, audio = FirstHops(RULES), (10 - WITHHELD_TOKENS) / TOKEN_RATE
    for _ in range(4):
        speak(first_hops, audio - left)
    assert begin(first_hops).short == short


def test_two_of_a_crowd_begin_short() -> None:
    first_hops = with_slack()
    assert sum(begin(first_hops).short for _ in range(100)) == 2


def test_one_slow_stream_ends_it_until_it_is_forgotten() -> None:
    first_hops = with_slack()
    speak(first_hops, LIMIT + 0.001)
    assert [speak(first_hops, 0.1) for _ in range(MEASURED + 1)] == [False] * MEASURED + [True]


def test_of_a_crowd_only_a_few_begin_so_and_others_follow_when_these_have_their_second_chunk() -> None:
    first_hops = with_slack()
    crowd = [begin(first_hops) for _ in range(MOST_AT_ONCE + 3)]
    assert [start.short for start in crowd] == [True] * MOST_AT_ONCE + [False] * 3
    crowd[0].sent(FIRST, 1.0)
    assert not begin(first_hops).short
    crowd[0].sent(SECOND, 1.1)
    assert begin(first_hops).short


@pytest.mark.parametrize("chunks", [[], [FIRST], [FINAL], [FIRST, FINAL]], ids=["none", "one", "one, final", "two"])
def test_a_stream_that_ends_early_makes_room_and_is_not_measured(chunks: list[Hop]) -> None:
    first_hops = with_slack()
    for _ in range(2 * MEASURED):
        start = begin(first_hops)
        assert start.short
        for chunk in chunks:
            start.sent(chunk, 1.0 + 10.0 * chunk.offset)
        start.end()
        start.end()


def test_what_nobody_hears_is_not_measured_and_never_short() -> None:
    first_hops = FirstHops(RULES)
    for _ in range(MEASURED):
        speak(first_hops, 0.0, heard=False)
    assert not begin(first_hops).short
    first_hops = with_slack()
    speak(first_hops, 100.0, heard=False)
    assert not begin(first_hops, heard=False).short
    assert begin(first_hops).short


def test_a_repeatable_stream_is_measured_and_never_short() -> None:
    first_hops = FirstHops(RULES)
    for _ in range(MEASURED):
        speak(first_hops, 0.0, repeatable=True)
    assert not begin(first_hops, repeatable=True).short
    assert begin(first_hops).short


@pytest.mark.parametrize(
    "rules", [HopRules(strategy="equal"), HopRules(first_hop=10, short_first_hop=10), HopRules(first_hop=8)]
)
def test_rules_without_a_short_first_hop(rules: HopRules) -> None:
    assert not begin(with_slack(rules)).short
