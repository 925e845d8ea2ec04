import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.constants import FLOW_CHUNK_TOKENS, LOOKAHEAD_TOKENS
from common.orchestrator.chunking import Chunk, HopRules, HopSchedule


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def drain(schedule: HopSchedule, total: int) -> list[Chunk]:
    """Chunks of an utterance whose tokens were all there from the start."""
    chunks = []
    while (chunk := schedule.next_chunk(total, ended=True)) is not None:
        chunks.append(chunk)
    return chunks


def hops(rules: HopRules, total: int, prompt_tokens: int = 0) -> list[int]:
    return [chunk.hop for chunk in drain(rules.schedule(prompt_tokens), total)]


def test_exponential_hops_double_up_to_the_cap() -> None:
    assert hops(HopRules(), 400) == [15, 30, 60, 100, 100, 95]


def test_equal_hops_stay_the_same() -> None:
    assert hops(HopRules(strategy="equal"), 70) == [15, 15, 15, 15, 10]


@pytest.mark.parametrize(("prompt_tokens", "first"), [(0, 25), (10, 15), (11, 39), (25, 25), (99, 26)])
def test_with_a_boundary_the_first_hop_reaches_it_and_doubling_starts_at_one_flow_chunk(
    prompt_tokens: int, first: int
) -> None:
    rules = HopRules(boundary=FLOW_CHUNK_TOKENS)
    assert hops(rules, first + 25 + 50 + 100 + 100 + 7, prompt_tokens) == [first, 25, 50, 100, 100, 7]


def test_a_chunk_waits_for_its_look_ahead() -> None:
    schedule = HopRules().schedule(0)
    assert schedule.next_chunk(15 + LOOKAHEAD_TOKENS - 1, ended=False) is None
    chunk = schedule.next_chunk(15 + LOOKAHEAD_TOKENS, ended=False)
    assert chunk == Chunk(0, 15, final=False)
    assert chunk.end_of_context == 15 + LOOKAHEAD_TOKENS


def test_the_final_chunk_takes_what_cannot_be_followed_by_a_look_ahead() -> None:
    assert drain(HopRules().schedule(0), 17) == [Chunk(0, 17, final=True)]
    assert drain(HopRules().schedule(0), 18) == [Chunk(0, 15, final=False), Chunk(15, 3, final=True)]
    assert drain(HopRules().schedule(0), 1) == [Chunk(0, 1, final=True)]


def test_no_tokens_make_no_chunk() -> None:
    assert HopRules().schedule(0).next_chunk(0, ended=True) is None


def test_time_based_waits_for_more_while_the_listener_has_plenty_and_takes_what_is_ready_otherwise() -> None:
    clock = Clock()
    rules = HopRules(strategy="time_based")
    schedule = rules.schedule(0, clock)
    assert schedule.next_chunk(18, ended=False) == Chunk(0, 15, final=False)
    clock.now = 0.05  # 11 audible tokens are 0.44 s, nearly nine chunks of 0.05 s
    assert schedule.next_chunk(15 + 30 + LOOKAHEAD_TOKENS, ended=False) is None
    assert schedule.next_chunk(15 + 45 + LOOKAHEAD_TOKENS, ended=False) == Chunk(15, 45, final=False)


def test_time_based_stops_waiting_once_the_listener_has_little_left() -> None:
    clock = Clock()
    schedule = HopRules(strategy="time_based").schedule(0, clock)
    schedule.next_chunk(18, ended=False)
    clock.now = 0.05
    available = 15 + 30 + LOOKAHEAD_TOKENS
    assert schedule.next_chunk(available, ended=False) is None
    clock.now = 0.45
    assert schedule.next_chunk(available, ended=False) == Chunk(15, 30, final=False)


def test_time_based_takes_the_backlog_at_once_when_rendering_is_slow() -> None:
    clock = Clock()
    schedule = HopRules(strategy="time_based").schedule(0, clock)
    schedule.next_chunk(18, ended=False)
    clock.now = 0.4
    assert schedule.next_chunk(15 + 40 + LOOKAHEAD_TOKENS, ended=False) == Chunk(15, 30, final=False)
    clock.now = 1.6
    assert schedule.next_chunk(45 + 77 + LOOKAHEAD_TOKENS, ended=False) == Chunk(45, 75, final=False)


@settings(deadline=None)
@given(
    strategy=st.sampled_from(["exponential", "equal", "time_based"]),
    boundary=st.sampled_from([1, FLOW_CHUNK_TOKENS]),
    first_hop=st.integers(5, 60),
    prompt_tokens=st.integers(0, 800),
    arrivals=st.lists(st.tuples(st.integers(1, 120), st.floats(0, 2)), min_size=1, max_size=60),
)
def test_whatever_the_arrival_every_token_is_rendered_once_and_in_order(
    strategy: str, boundary: int, first_hop: int, prompt_tokens: int, arrivals: list[tuple[int, float]]
) -> None:
    clock = Clock()
    rules = HopRules(strategy=strategy, boundary=boundary, first_hop=first_hop)
    schedule = rules.schedule(prompt_tokens, clock)
    chunks: list[Chunk] = []
    available = 0
    for tokens, wait in arrivals:
        available += tokens
        clock.now += wait
        while (chunk := schedule.next_chunk(available, ended=False)) is not None:
            assert chunk.end_of_context <= available
            chunks.append(chunk)
            clock.now += wait / 2
    chunks += drain(schedule, available)

    assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [chunk.offset for chunk in chunks] == [0, *(chunk.end for chunk in chunks[:-1])]
    assert chunks[-1].end == available
    assert all(chunk.hop >= first_hop for chunk in chunks[:-1])
    assert 1 <= chunks[-1].hop
    assert all((prompt_tokens + chunk.end) % boundary == 0 for chunk in chunks[:-1])
    assert all(chunk.hop <= rules.max_hop for chunk in chunks[1:-1])
    if strategy != "time_based":
        assert chunks == drain(rules.schedule(prompt_tokens), available)


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"strategy": "fastest"}, "'fastest'"),
        ({"first_hop": 4}, "first hop of 4"),
        ({"max_hop": 14}, "largest hop of 14"),
        ({"max_hop": 60, "boundary": FLOW_CHUNK_TOKENS}, "largest hop of 60"),
    ],
)
def test_rules_that_cannot_work_are_rejected_by_value(settings: dict[str, object], value: str) -> None:
    with pytest.raises(ValueError, match=value):
        HopRules(**settings)
