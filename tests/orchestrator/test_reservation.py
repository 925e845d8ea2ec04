"""A listener's place in token2wav is reserved while the LLM starts; after a refusal before that."""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable

import pytest
from cosyvoice_triton.errors import OverloadedError, UnavailableError
from cosyvoice_triton.orchestrator.request import SynthesisRequest
from cosyvoice_triton.orchestrator.synthesis import CAREFUL_SECONDS, CROWD
from cosyvoice_triton.refusals import FREEING_SECONDS, REFUSAL_SECONDS

from tests.support.fakes import FakeLM, FakeToken2Wav, FakeToken2WavStream, fake_prompt, speech_request
from tests.support.pipeline import Pipeline, one_by_one, run_until, settle


def test_a_place_is_given_up_after_the_llms_request_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gets the place needs the LLM, too, and it may serve no more requests than there are places."""
    pipeline = Pipeline(FakeLM(*one_by_one(60), asyncio.Event()), token2wav=FakeToken2Wav(failures={0: RuntimeError()}))
    live, abort = list[int](), FakeToken2WavStream.abort

    async def watched(stream: FakeToken2WavStream) -> None:
        live.append(pipeline.llm.open)
        await abort(stream)

    monkeypatch.setattr(FakeToken2WavStream, "abort", watched)
    with pytest.raises(RuntimeError):
        pipeline.run()
    assert live == [0]


Install = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture
def before_a_place(monkeypatch: pytest.MonkeyPatch) -> Install:
    """`before_a_place(wait)`: a place is only given after `wait`."""
    reserve = FakeToken2WavStream.reserve

    def install(wait: Callable[[], Awaitable[None]]) -> None:
        async def waiting(stream: FakeToken2WavStream) -> None:
            await wait()
            assert not stream.started
            await reserve(stream)

        monkeypatch.setattr(FakeToken2WavStream, "reserve", waiting)

    return install


@pytest.mark.parametrize(
    ("voice", "since_refusal", "crowd", "before"),
    [
        # What was done before the place was asked for: the voice was read, the LLM started, the voice encoded.
        ("registered", math.inf, 0, {"read", "llm"}),
        ("heard before", math.inf, 0, {"read", "llm"}),
        ("new", math.inf, 0, {"read"}),
        ("registered", CAREFUL_SECONDS, 0, {"read", "llm"}),
        ("registered", 0.9 * CAREFUL_SECONDS, 0, set()),
        ("heard before", 0.9 * CAREFUL_SECONDS, 0, set()),
        ("new", 0.9 * CAREFUL_SECONDS, 0, set()),
        ("registered", math.inf, CROWD, set()),
        ("new", math.inf, CROWD, set()),
    ],
)
def test_when_a_place_is_asked_for(voice, since_refusal, crowd, before, before_a_place) -> None:
    now = [100.0]
    pipeline = Pipeline(FakeLM(*one_by_one(18)), clock=lambda: now[0])
    pipeline.voices["anna"] = fake_prompt(0)
    request = SynthesisRequest("hello", "anna") if voice == "registered" else speech_request()
    if voice == "heard before":
        pipeline.run(pipeline.synthesize(request))
    if since_refusal < math.inf:
        refuse(pipeline)
        now[0] += since_refusal
    pipeline.synthesizer._beginning = crowd
    pipeline.llm.prompts, pipeline.encoder.started, pipeline.encoder.ended = [], [], []
    done, read = list[set[str]](), pipeline.synthesizer._read
    seen = set[str]()
    pipeline.synthesizer._read = lambda of: seen.add("read") or read(of)  # type: ignore[method-assign, func-returns-value]

    async def wait() -> None:
        if "llm" in before:
            await run_until(lambda: pipeline.llm.prompts != [])
        await settle()
        done.append(seen | ({"llm"} if pipeline.llm.prompts else set()) | set(pipeline.encoder.started))

    before_a_place(wait)
    assert pipeline.run(pipeline.synthesize(request)) and done == [before]


def test_a_refusal_of_a_known_voice_ends_the_llms_request() -> None:
    pipeline = Pipeline(FakeLM(*one_by_one(18)))
    assert pipeline.run()
    pipeline.token2wav.failures = {"reserve": OverloadedError("9 listeners are served", 3.0)}
    pipeline.llm.steps = (asyncio.Event(),)  # never ends by itself
    with pytest.raises(OverloadedError, match="9 listeners"):
        pipeline.run()
    assert len(pipeline.llm.prompts) == 2 and [stream.aborts for stream in pipeline.token2wav.streams][1:] == [0]


def refuse(pipeline: Pipeline) -> None:
    """Let token2wav refuse a listener, and no later one."""
    pipeline.token2wav.failures = {"reserve": OverloadedError("9 listeners are served", 3.0)}
    with pytest.raises(OverloadedError, match="9 listeners"):
        pipeline.run(pipeline.synthesize(SynthesisRequest("hello", "anna")))
    assert pipeline.llm.open == 0 and pipeline.token2wav.streams[-1].aborts == 0
    pipeline.token2wav.failures = {}


def test_a_refusal_is_the_reason_where_the_llm_has_no_place_either(before_a_place: Install) -> None:
    refusal = {"reserve": OverloadedError("9 listeners are served", 3.0)}
    llm = FakeLM(UnavailableError("the LLM already serves its maximum"))
    pipeline = Pipeline(llm, token2wav=FakeToken2Wav(failures=refusal))

    pipeline.voices["anna"] = fake_prompt(0)

    async def wait() -> None:
        await run_until(lambda: len(pipeline.llm.prompts) == 1)
        await settle()

    before_a_place(wait)
    with pytest.raises(OverloadedError, match="9 listeners"):
        pipeline.run(pipeline.synthesize(SynthesisRequest("hello", "anna")))


def test_a_refusal_answers_all_who_come_in_the_next_moment() -> None:
    """Before their requests are read, and without asking token2wav again."""
    now = [100.0]
    pipeline = Pipeline(FakeLM([1]), clock=lambda: now[0])
    pipeline.voices["anna"] = fake_prompt(0)
    refuse(pipeline)
    for check in (pipeline.synthesizer.refusal.check, pipeline.run):
        with pytest.raises(OverloadedError, match="9 listeners"):
            check()
    assert [stream.reserved for stream in pipeline.token2wav.streams] == [True, False]
    now[0] += REFUSAL_SECONDS
    pipeline.synthesizer.refusal.check()


async def test_a_place_that_its_listener_leaves_is_asked_for_at_once() -> None:
    now = [100.0]
    pipeline = Pipeline(FakeLM(*one_by_one(60), asyncio.Event()), clock=lambda: now[0])
    request = SynthesisRequest("hello", "anna")
    pipeline.voices["anna"] = fake_prompt(0)
    async with pipeline:
        listener = asyncio.create_task(pipeline.synthesize(request))
        await run_until(lambda: bool(pipeline.token2wav.streams and pipeline.token2wav.streams[0].hops))
        pipeline.token2wav.failures = {"reserve": OverloadedError("9 listeners are served", 3.0)}
        for _ in range(2):
            with pytest.raises(OverloadedError):
                await pipeline.synthesize(request)
        assert [stream.reserved for stream in pipeline.token2wav.streams] == [True, True, False]
        listener.cancel()
        await asyncio.wait({listener})
        for kept in (False, True):  # token2wav may have refused once more before it knew
            with pytest.raises(OverloadedError):
                await pipeline.synthesize(request)
            with pytest.raises(OverloadedError) if kept else contextlib.nullcontext():
                pipeline.synthesizer.refusal.check()
            now[0] += FREEING_SECONDS


async def test_of_a_crowd_only_a_few_do_any_work_before_one_of_them_is_refused(
    before_a_place: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def here(function: Callable[..., object], *arguments: object) -> object:
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", here)  # a late thread would let its listener ask after the refusal
    token2wav = FakeToken2Wav(failures={"reserve": OverloadedError("9 listeners", 3.0)})
    slow = itertools.count(100.0, 2 * REFUSAL_SECONDS)  # a machine on which every step takes longer than that
    pipeline = Pipeline(FakeLM([1]), token2wav=token2wav, clock=lambda: next(slow))
    pipeline.voices["anna"] = fake_prompt(0)
    before_a_place(settle)  # all have come before the first refusal
    async with pipeline:
        requests = [SynthesisRequest("hello", "anna"), speech_request(7)] * 150
        answers = await asyncio.gather(*map(pipeline.synthesize, requests), return_exceptions=True)
        assert {type(answer) for answer in answers} == {OverloadedError}
    assert len(pipeline.llm.prompts) <= CROWD and pipeline.encoder.started == []
    assert sum(stream.reserved for stream in pipeline.token2wav.streams) <= CROWD
