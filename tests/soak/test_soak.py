"""The soak's accounting and its judgement of growth, without a tritonserver."""

from collections.abc import Sequence

import numpy as np
import pytest
from cosyvoice_triton.load.measure import RequestOutcome

from tests.soak.faults import KINDS, InjectedFault
from tests.soak.outcomes import settled
from tests.soak.runner import SoakResult
from tests.soak.sampling import JUDGED_SECONDS, LONG_SECONDS, WARM_UP_SECONDS, ProcessHistory
from tests.soak.stack import Life


def fault(name: str, begun: float, end: float) -> InjectedFault:
    return InjectedFault(KINDS[name], 1, begun, end)


def broken(route: str, begun: float, end: float) -> RequestOutcome:
    return RequestOutcome("one", route, begun, (), (), end - begun, "it broke")


@pytest.mark.parametrize(
    ("injected", "route", "begun", "outcome"),
    [
        ([], "grpc", 10.0, "lost"),
        ([fault("kill tensorrt_llm", 11.0, 30.0)], "grpc", 10.0, "failed"),  # under way when it happened
        ([fault("kill tensorrt_llm", 1.0, 10.5)], "grpc", 10.0, "failed"),
        ([fault("kill tensorrt_llm", 1.0, 9.0)], "grpc", 10.0, "lost"),  # everything was ready again
        ([fault("kill tensorrt_llm", 13.0, 30.0)], "grpc", 10.0, "lost"),  # it ended before
        ([fault("kill speech", 11.0, 30.0)], "grpc", 10.0, "lost"),  # does not concern it
        ([fault("kill speech", 11.0, 30.0)], "websocket", 10.0, "failed"),
        ([fault("file out_of_memory", 11.0, 30.0)], "grpc", 10.0, "lost"),  # no request may fail by it
    ],
)
def test_an_error_is_lost_unless_a_fault_explains_it(
    injected: list[InjectedFault], route: str, begun: float, outcome: str
) -> None:
    (request,) = settled([broken(route, begun, begun + 2)], injected)
    assert request.outcome == outcome and bool(request.fault) == (outcome == "failed")


def test_a_fault_of_one_row_explains_one_error() -> None:
    times = (18.0, 22.0), (10.0, 12.0), (10.0, 12.0)  # the first: of the killed process
    injected = fault("file nan_logits", 11.0, 20.0), fault("kill tensorrt_llm", 21.0, 30.0)
    requests = settled([broken("grpc", *each) for each in times], injected)
    assert [request.outcome for request in requests] == ["failed", "failed", "lost"]
    assert SoakResult(0.0, requests=requests).problems() == [
        "lost: request one, grpc, begun at 10.0 s, ended at 12.0 s: it broke"
    ]


def test_a_service_that_ends_by_itself_or_does_not_recover_is_a_problem() -> None:
    hung = fault("kill tensorrt_llm", 10.0, 20.0)
    hung.failed, hung.note = True, "not ready within 180 s"
    found = SoakResult(
        0.0, lives=[Life("serve", 0.0, 7, 5.0, 30.0, 1, "has died")], faults=[hung], left=["a voice"]
    ).problems()
    assert found == [
        "ended by itself: serve (process 7) at 30.0 s with code 1: has died",
        "fault 1. kill tensorrt_llm at 10.0 s: not ready within 180 s",
        "left behind: a voice",
    ]


LONG = WARM_UP_SECONDS + LONG_SECONDS
HOUR = 30 * 60.0  # the last life in an hour of soak


def history(values: Sequence[float] | np.ndarray, seconds: float = WARM_UP_SECONDS + JUDGED_SECONDS) -> ProcessHistory:
    """A process that has each measure's values over a life of so many seconds."""
    at, values = np.linspace(0, seconds, len(values)).tolist(), list(values)
    return ProcessHistory("model", 1, at=at, memory=values, threads=values)


def grows(process: ProcessHistory) -> bool:
    growth = process.growth("memory")
    assert growth is not None
    assert bool(SoakResult(0.0, growths=[growth]).problems()) == growth.grows
    return growth.grows


def steps(*sizes: tuple[float, int]) -> list[float]:
    return [size for size, count in sizes for _ in range(count)]


NOISE = 200 * np.random.default_rng(1).random(360)  # work under way, MiB


@pytest.mark.parametrize(
    ("values", "seconds", "expected"),
    [
        (300 + NOISE + np.linspace(0, 60, 360), HOUR, True),  # 2 MiB a minute
        (300 + NOISE, HOUR, False),
        (NOISE + steps((300, 60), (500, 40), (700, 40), (850, 220)), HOUR, False),  # the largest work comes early
        (NOISE + steps((300, 240), (360, 120)), HOUR, True),  # a step that comes late, and stays
        (NOISE + steps((300, 320), (360, 40)), HOUR, False),  # it may go again
        (300 + NOISE + np.linspace(0, 60, 360), LONG - 60, False),  # too slow for a life so short
        (300 + NOISE + np.linspace(0, 600, 360), LONG - 60, True),
    ],
)
def test_memory_grows_if_what_stays_is_more_at_the_end(values: np.ndarray, seconds: float, expected: bool) -> None:
    assert grows(history(values, seconds)) == expected
