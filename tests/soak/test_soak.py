"""The soak's accounting, its clients and its judgement of growth, without a tritonserver."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton.client.requests import ClientError, Utterance
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.errors import OverloadedError, unavailable_message
from cosyvoice_triton.load.samples import Sample
from cosyvoice_triton.server.tritonserver import free_port
from cosyvoice_triton.speech_service.settings import Settings
from cosyvoice_triton.voice.prompt import Recording

from tests.soak import runner
from tests.soak.cases import WEIGHTS, SoakCase, SoakPlan
from tests.soak.faults import KINDS, InjectedFault
from tests.soak.ledger import Ledger, Request
from tests.soak.routes import ROUTES, Addresses, Client, Parts
from tests.soak.runner import MixedLoad, SoakResult, SoakSettings
from tests.soak.sampling import JUDGED_SECONDS, LONG_SECONDS, WARM_UP_SECONDS, Measure, ProcessHistory
from tests.soak.stack import Life
from tests.support.speech_fixtures import serving, stub_triton
from tests.support.triton_stub import TritonStub

PATIENCE, SHORT = 60.0, 0.1  # seconds; the short one only where a hang is what must be noticed
OVERLOADED = unavailable_message(OverloadedError("listeners: 1, 0.2 end each second", 3.0))
SECOND = np.full(SAMPLE_RATE, 0.1, np.float32)
SAMPLE = Sample(
    "one", "quick words", Recording(np.resize(np.array([0.1, -0.1], np.float32), PROMPT_SAMPLE_RATE)), "A transcript."
)
PLAN = SoakPlan(1, tuple(WEIGHTS), [SAMPLE])

Send = Callable[[Parts], Awaitable[None]]


def case(route: str = "grpc", **how: Any) -> SoakCase:
    given = {"number": 1, "route": route, "kind": "good", "cancel_after": 0, "pause": 0.0, "choice": 0}
    said = Utterance("quick words", speaker="slt", parameters={"seed": 1})
    return SoakCase(**{**given, "utterance": said, **how})


# --- one request -----------------------------------------------------------------------------------------------------


async def parts_of(parts: Parts, count: int, then: Exception | float | None = None) -> None:
    """An answer of `count` parts, and then an error, or a silence of so many seconds."""
    for _ in range(count):
        parts.add(SECOND)
        await asyncio.sleep(0)
    if isinstance(then, Exception):
        raise then
    await asyncio.sleep(then or 0)


def ended(
    send: Send, wanted: SoakCase | None = None, expected: str | None = None, patience: float = PATIENCE
) -> Request:
    """How a request with that answer is accounted for."""

    async def run() -> Request:
        load = MixedLoad(PLAN, Client(Addresses()), Ledger(), patience, asyncio.get_running_loop().time)
        return await load.request(wanted or case(), "test", send, expected)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "outcome", "reason"),
    [
        ((2,), "done", ""),
        ((2, ClientError("token2wav broke")), None, "token2wav broke"),
        ((0, RuntimeError("a bug")), None, "RuntimeError: a bug"),
        ((0, ClientError("HTTP 429 full")), "refused", "HTTP 429 full"),
        ((0, ClientError(OVERLOADED)), "refused", OVERLOADED),
        ((1, 600.0), "hung", "nothing for 0.1 s, after 1 parts"),
        ((0, 600.0), "hung", "nothing for 0.1 s, after 0 parts"),
    ],
)
def test_a_request_is_accounted_for_by_how_it_ends(answer: Any, outcome: str | None, reason: str) -> None:
    patience = SHORT if outcome == "hung" else PATIENCE
    request = ended(lambda parts: parts_of(parts, *answer), patience=patience)
    assert (request.outcome, request.reason) == (outcome, reason)
    assert request.ended is not None and (request.first is not None) == bool(answer[0])


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [((0, ClientError("it is too long")), "rejected"), ((0, ClientError("?")), None), ((1,), None)],
)
def test_bad_input_must_get_its_error(answer: Any, outcome: str | None) -> None:
    request = ended(lambda parts: parts_of(parts, *answer), case(kind="bad"), "too long")
    assert request.outcome == outcome and (outcome or "/too long/" in request.reason)


@pytest.mark.parametrize(("after", "pause"), [(1, 600.0), (2, 600.0), (0, 0.02)])
def test_a_request_is_cancelled_after_parts_or_a_pause(after: int, pause: float) -> None:
    cancelled = case(kind="cancel", cancel_after=after, pause=pause)
    assert ended(lambda parts: parts_of(parts, 3, 600.0), cancelled).outcome == "cancelled"


# --- a run -----------------------------------------------------------------------------------------------------------


def fault(name: str, begun: float, end: float) -> InjectedFault:
    return InjectedFault(KINDS[name], 1, begun, end)


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
    ledger = Ledger()
    ledger.close(ledger.open(1, route, "test", begun), None, "it broke", begun + 2)
    assert ledger.errors == 1
    ledger.settle(injected)
    assert ledger.counts() == {outcome: 1}


def test_a_fault_of_one_row_explains_one_error_and_what_never_ends_has_hung() -> None:
    ledger = Ledger()
    for number, (begun, end) in enumerate(
        [(18.0, 22.0), (10.0, 12.0), (10.0, 12.0)]
    ):  # the first: of the killed process
        ledger.close(ledger.open(number, "grpc", "test", begun), None, "it broke", end)
    ledger.open(3, "grpc", "test", 10.0)
    ledger.settle([fault("file nan_logits", 11.0, 20.0), fault("kill tensorrt_llm", 21.0, 30.0)])
    assert [request.outcome for request in ledger.requests] == ["failed", "failed", "lost", "hung"]
    assert [request.number for request in ledger.offenders()] == [2, 3]


def result(**found: Any) -> SoakResult:
    settings = SoakSettings(1.0, 1, 1, 60.0, True, Path(), Path())
    return SoakResult(settings, Ledger(), 0.0, 60.0, **found)


def test_a_service_that_ends_by_itself_or_does_not_recover_is_a_problem() -> None:
    hung = fault("kill tensorrt_llm", 10.0, 20.0)
    hung.failed, hung.note = True, "not ready within 180 s"
    found = result(lives=[Life("serve", 0.0, 7, 5.0, 30.0, 1, "has died")], faults=[hung], left=["a voice"]).problems()
    assert found == [
        "ended by itself: serve (process 7) at 30.0 s with code 1: has died",
        "fault 1. kill tensorrt_llm at 10.0 s: not ready within 180 s",
        "left behind: a voice",
    ]


# --- growth ----------------------------------------------------------------------------------------------------------


LONG = WARM_UP_SECONDS + LONG_SECONDS
HOUR = 30 * 60.0  # the last life in an hour of soak


def history(values: Sequence[float] | np.ndarray, seconds: float = WARM_UP_SECONDS + JUDGED_SECONDS) -> ProcessHistory:
    """A process that has each measure's values over a life of so many seconds."""
    at, values = np.linspace(0, seconds, len(values)).tolist(), list(values)
    return ProcessHistory("model", 1, at=at, memory=values, threads=values)


def grows(process: ProcessHistory, measure: Measure = "memory") -> bool:
    growth = process.growth(measure)
    assert growth is not None
    assert bool(result(growths=[growth]).problems()) == growth.grows
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


# --- the requests ----------------------------------------------------------------------------------------------------


# --- the clients, against a service in front of a stub ----------------------------------------------------------------


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    port, voices = free_port(), tmp_path_factory.mktemp("voices")
    with stub_triton(TritonStub()) as triton:
        settings = Settings(urls=(triton,), voices_dir=voices, runtime_port=port)
        with serving(settings) as url:
            yield Addresses(grpc=triton, speech=url, runtime=f"127.0.0.1:{port}", streaming="cosyvoice2_dit")


def send(addresses: Addresses, sent: SoakCase) -> Parts:
    async def run() -> Parts:
        parts = Parts(lambda: None)
        async with Client(addresses) as client:
            await client.send(sent, parts)
        return parts

    return asyncio.run(run())


@pytest.mark.parametrize(
    "route", [route for route in ROUTES if route not in ("grpc-offline", "triton-http", "hostile")]
)
@pytest.mark.parametrize(("word", "good"), [("quick", True), ("break", False), ("silent", False)])
def test_no_route_takes_half_an_answer_for_a_whole_one(route: str, word: str, good: bool, addresses: Addresses) -> None:
    said = Utterance(f"{word} words", speaker="slt", parameters={"seed": 1})
    with contextlib.nullcontext() if good else pytest.raises(ClientError):
        assert send(addresses, case(route, utterance=said)).count


def test_running_servers_are_loaded_without_faults(addresses: Addresses, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub takes every text and voice, so what only the models refuse is lost."""
    monkeypatch.setattr(runner, "PAUSE_SECONDS", 0.01)
    settings = SoakSettings(1.0 / 60, 1, 4, 10.0, True, Path(), Path(), addresses=addresses)
    found = asyncio.run(runner.soak(settings, [SAMPLE], lambda *_: None))
    assert not found.faults and not found.interrupted
    assert "done" in {request.outcome for request in found.ledger.requests}
    assert [each for each in found.ledger.offenders() if "instead of the error" not in each.reason] == []
