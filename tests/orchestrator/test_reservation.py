"""A listener's place in token2wav is reserved while the LLM starts; after a refusal before that."""

import asyncio

import numpy as np
import pytest
from cosyvoice_triton.errors import OverloadedError, UnavailableError
from cosyvoice_triton.orchestrator.synthesis import CAREFUL_SECONDS

from tests.support.fakes import FakeLM, FakeToken2Wav, FakeToken2WavStream
from tests.support.pipeline import Pipeline, one_by_one, run_until, settle


def test_a_place_is_given_up_after_the_llms_request_has_ended() -> None:
    """Whoever gets the place needs the LLM, too, and it may serve no more requests than there are places."""
    pipeline = Pipeline(FakeLM(*one_by_one(60), asyncio.Event()), token2wav=FakeToken2Wav(failures={0: RuntimeError()}))
    token2wav, live = pipeline.token2wav, []

    def opened() -> FakeToken2WavStream:
        stream = FakeToken2Wav.open(token2wav)
        abort = stream.abort

        async def watched() -> None:
            live.append(pipeline.llm.unclosed)
            await abort()

        stream.abort = watched  # type: ignore[method-assign]  # of this stream only
        return stream

    token2wav.open = opened  # type: ignore[method-assign]  # the same
    with pytest.raises(RuntimeError):
        pipeline.run()
    assert live == [0]


def test_the_llm_starts_while_a_place_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline(FakeLM(*one_by_one(18)))
    reserve = FakeToken2WavStream.reserve

    async def slow(stream: FakeToken2WavStream) -> None:
        await run_until(lambda: len(pipeline.llm.prompts) == 1)
        assert not stream.started
        await reserve(stream)

    monkeypatch.setattr(FakeToken2WavStream, "reserve", slow)
    assert pipeline.run()


def test_a_known_voices_place_is_asked_for_once_the_llm_has_been_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a new voice while it is encoded, so that a refusal ends that early."""
    pipeline, before, reserve = Pipeline(FakeLM(*one_by_one(18))), list[tuple[int, int]](), FakeToken2WavStream.reserve

    async def noted(stream: FakeToken2WavStream) -> None:
        before.append((len(pipeline.encoder.ended), len(pipeline.llm.prompts)))
        await reserve(stream)

    monkeypatch.setattr(FakeToken2WavStream, "reserve", noted)
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


def test_the_voice_is_sent_after_its_place_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, place = Pipeline(FakeLM(*one_by_one(18))), asyncio.Event()

    async def slow(stream: FakeToken2WavStream) -> None:
        await place.wait()

    async def scenario() -> list[np.ndarray]:
        synthesis = asyncio.create_task(pipeline.synthesize())
        await run_until(lambda: len(pipeline.encoder.ended) == 3 and len(pipeline.llm.prompts) == 1)
        await settle()
        assert not any(stream.started for stream in pipeline.token2wav.streams)
        place.set()
        return await synthesis

    monkeypatch.setattr(FakeToken2WavStream, "reserve", slow)
    assert pipeline.run(scenario())


def refused(now: list[float]) -> Pipeline:
    """A pipeline whose first listener was refused at 100 s."""
    refusal = OverloadedError("9 listeners are served", 3.0)
    pipeline = Pipeline(FakeLM([1]), token2wav=FakeToken2Wav(failures={"reserve": refusal}), clock=lambda: now[0])
    with pytest.raises(OverloadedError, match="9 listeners"):
        pipeline.run()
    assert pipeline.llm.unclosed == 0 and [stream.aborts for stream in pipeline.token2wav.streams] == [0]
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


def test_a_refusal_is_the_reason_where_the_llm_has_no_place_either(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline(FakeLM(UnavailableError("the LLM already serves its maximum")))

    async def refused_later(stream: FakeToken2WavStream) -> None:
        await run_until(lambda: len(pipeline.llm.prompts) == 1)
        await settle()
        raise OverloadedError("9 listeners are served", 3.0)

    monkeypatch.setattr(FakeToken2WavStream, "reserve", refused_later)
    with pytest.raises(OverloadedError, match="9 listeners"):
        pipeline.run()


def test_some_time_after_a_refusal_the_llm_starts_early_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    pipeline = refused(now)
    now[0] += CAREFUL_SECONDS

    async def slow(stream: FakeToken2WavStream) -> None:
        await run_until(lambda: len(pipeline.llm.prompts) == 1)

    monkeypatch.setattr(FakeToken2WavStream, "reserve", slow)
    assert pipeline.run()


def test_after_a_refusal_the_text_is_prepared_while_a_place_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, prepared = refused([100.0]), list[str]()
    monkeypatch.setattr(pipeline.texts, "transcript", lambda text, normalize: prepared.append(text) or text)

    async def slow(stream: FakeToken2WavStream) -> None:
        await run_until(lambda: bool(prepared))
        assert pipeline.llm.prompts == [] and pipeline.encoder.started == []

    monkeypatch.setattr(FakeToken2WavStream, "reserve", slow)
    assert pipeline.run()
