"""A listener's place in token2wav is reserved while the LLM starts; after a refusal before that."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from cosyvoice_triton.errors import OverloadedError, UnavailableError
from cosyvoice_triton.orchestrator.request import SynthesisRequest
from cosyvoice_triton.orchestrator.synthesis import CAREFUL_SECONDS, CROWD
from cosyvoice_triton.refusals import REFUSAL_SECONDS

from tests.support.fakes import FakeLM, FakeToken2Wav, FakeToken2WavStream, fake_prompt, speech_request
from tests.support.pipeline import Pipeline, one_by_one, run_until, settle


def test_a_place_is_given_up_after_the_llms_request_has_ended() -> None:
    """Whoever gets the place needs the LLM, too, and it may serve no more requests than there are places."""
    pipeline = Pipeline(FakeLM(*one_by_one(60), asyncio.Event()), token2wav=FakeToken2Wav(failures={0: RuntimeError()}))
    token2wav, live = pipeline.token2wav, []

    def opened() -> FakeToken2WavStream:
        stream = FakeToken2Wav.open(token2wav)
        abort = stream.abort

        async def watched() -> None:
            live.append(pipeline.llm.open)
            await abort()

        stream.abort = watched  # type: ignore[method-assign]  # of this stream only
        return stream

    token2wav.open = opened  # type: ignore[method-assign]  # the same
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


def test_a_place_is_reserved_once_the_llm_has_started_but_before_a_new_voice_is_encoded(before_a_place) -> None:
    pipeline, before = Pipeline(FakeLM(*one_by_one(18))), list[tuple[int, int]]()

    async def wait() -> None:
        await settle()
        before.append((len(pipeline.encoder.started), len(pipeline.llm.prompts)))

    before_a_place(wait)
    assert pipeline.run() and pipeline.run()
    assert before == [(0, 0), (3, 2)]


def test_a_refusal_of_a_known_voice_ends_the_llms_request() -> None:
    pipeline = Pipeline(FakeLM(*one_by_one(18)))
    assert pipeline.run()
    pipeline.token2wav.failures = {"reserve": OverloadedError("9 listeners are served", 3.0)}
    pipeline.llm.steps = (asyncio.Event(),)  # never ends by itself
    with pytest.raises(OverloadedError, match="9 listeners"):
        pipeline.run()
    assert len(pipeline.llm.prompts) == 2 and [stream.aborts for stream in pipeline.token2wav.streams][1:] == [0]


def refused(now: list[float]) -> Pipeline:
    """A pipeline whose first listener was refused at 100 s."""
    refusal = OverloadedError("9 listeners are served", 3.0)
    pipeline = Pipeline(FakeLM([1]), token2wav=FakeToken2Wav(failures={"reserve": refusal}), clock=lambda: now[0])
    with pytest.raises(OverloadedError, match="9 listeners"):
        pipeline.run()
    assert pipeline.llm.open == 0 and [stream.aborts for stream in pipeline.token2wav.streams] == [0]
    pipeline.llm.prompts.clear()
    for calls in (pipeline.encoder.started, pipeline.encoder.ended):
        calls.clear()
    return pipeline


def test_after_a_refusal_others_cost_neither_the_llm_nor_the_prompt_models_anything() -> None:
    """At several times the capacity, what refusals cost would be taken from those who were admitted."""
    now = [100.0]
    pipeline = refused(now)
    now[0] += 0.9 * CAREFUL_SECONDS
    with pytest.raises(OverloadedError, match="9 listeners"):
        pipeline.run()
    assert pipeline.llm.prompts == [] and pipeline.encoder.started == []


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


@pytest.mark.parametrize("later", [False, True])
def test_after_a_refusal_work_waits_for_places_for_some_time(later, monkeypatch, before_a_place) -> None:
    now = [100.0]
    pipeline, prepared = refused(now), list[str]()
    pipeline.voices["anna"] = fake_prompt(0)  # a voice that is known
    monkeypatch.setattr(pipeline.texts, "transcript", lambda text, normalize: prepared.append(text) or text)
    pipeline.token2wav.failures = {}

    async def wait() -> None:
        if later:  # the LLM starts early again
            await run_until(lambda: len(pipeline.llm.prompts) == 1)
            return
        await settle()
        assert pipeline.llm.prompts == [] and pipeline.encoder.started == [] and prepared == []

    now[0] += CAREFUL_SECONDS if later else 0.9 * CAREFUL_SECONDS
    before_a_place(wait)
    assert pipeline.run(pipeline.synthesize(SynthesisRequest("hello", "anna")))


def test_a_refusal_answers_all_who_come_in_the_next_moment() -> None:
    """Before their requests are read, and without asking token2wav again."""
    now = [100.0]
    pipeline = refused(now)
    for check in (pipeline.synthesizer.refusal.check, pipeline.run):
        with pytest.raises(OverloadedError, match="9 listeners"):
            check()
    assert [stream.reserved for stream in pipeline.token2wav.streams] == [True, False]
    now[0] += REFUSAL_SECONDS
    pipeline.synthesizer.refusal.check()


def test_of_a_crowd_only_a_few_do_any_work_before_one_of_them_is_refused(before_a_place: Install) -> None:
    token2wav = FakeToken2Wav(failures={"reserve": OverloadedError("9 listeners", 3.0)})
    slow = itertools.count(100.0, 2 * REFUSAL_SECONDS)  # a machine on which every step takes longer than that
    pipeline = Pipeline(FakeLM([1]), token2wav=token2wav, clock=lambda: next(slow))
    pipeline.voices["anna"] = fake_prompt(0)
    before_a_place(settle)  # all have come before the first refusal

    async def crowd() -> list[np.ndarray]:
        requests = [SynthesisRequest("hello", "anna"), speech_request(7)] * 150
        answers = await asyncio.gather(*map(pipeline.synthesize, requests), return_exceptions=True)
        assert {type(answer) for answer in answers} == {OverloadedError}
        return []

    pipeline.run(crowd())
    assert len(pipeline.llm.prompts) <= CROWD and pipeline.encoder.started == []
    assert sum(stream.reserved for stream in pipeline.token2wav.streams) <= CROWD
