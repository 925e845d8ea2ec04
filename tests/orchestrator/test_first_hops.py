"""Which streams begin with a short first hop."""

import random

import pytest
from cosyvoice_triton.constants import TOKEN_RATE
from cosyvoice_triton.orchestrator.chunking import WITHHELD_TOKENS, FirstHops, Hop, HopRules, StreamOpening
from cosyvoice_triton.profiles import FirstHopNumbers

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


def test_what_nobody_plays_is_not_measured_and_never_short() -> None:
    first_hops = FirstHops(RULES)
    for _ in range(4):
        speak(first_hops, 0.0, played=False)
    assert not begin(first_hops).short
    first_hops = with_slack()
    speak(first_hops, 100.0, played=False)
    assert not begin(first_hops, played=False).short
    assert begin(first_hops).short


def test_a_repeatable_stream_is_measured_and_never_short() -> None:
    first_hops = FirstHops(RULES)
    for _ in range(4):
        speak(first_hops, 0.0, repeatable=True)
    assert not begin(first_hops, repeatable=True).short
    assert begin(first_hops).short


@pytest.mark.parametrize(
    "rules", [HopRules(strategy="equal"), HopRules(first_hop=10, short_first_hop=10), HopRules(first_hop=8)]
)
def test_rules_without_a_short_first_hop(rules: HopRules) -> None:
    assert not begin(with_slack(rules)).short
