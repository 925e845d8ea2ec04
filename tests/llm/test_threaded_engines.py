"""What every engine with a thread of its own does, with real models on the CPU: batching, cancellation, seeds, ends."""

import asyncio
import dataclasses

import numpy as np
import pytest
from cosyvoice_triton.errors import FatalError
from cosyvoice_triton.llm.engines.interface import EngineLM, GenerationRequest
from cosyvoice_triton.llm.engines.threaded_engine import Generation, OnTokens, ThreadedEngine
from cosyvoice_triton.llm.interface import LLMPrompt, Sampling
from cosyvoice_triton.monitoring.health import Health, reported_failures
from cosyvoice_triton.profiles import H200

from tests.support.llm_fixtures import chunks_of, load_engine, request_of, tokens_of
from tests.support.waiting import until

STREAMS = 8


@pytest.fixture(params=["onnxruntime_genai", "cuda"])
def engine(request, tokenizer):
    directory = request.getfixturevalue("llm_dir" if request.param == "cuda" else "genai_dir")
    engine = load_engine(request.param, directory, tokenizer, STREAMS, instance_kind="KIND_CPU")
    yield engine
    engine.close()


async def test_eight_concurrent_requests_get_the_same_tokens_as_alone(engine, tokenizer):
    sampling = [{"seed": i, "temperature": 0.5 + 0.2 * i, "top_k": 5 * i} for i in range(STREAMS)]
    requests = [request_of(tokenizer, "text " * (i + 1), **of) for i, of in enumerate(sampling)]
    alone = [await tokens_of(engine, request) for request in requests]
    assert await asyncio.gather(*(tokens_of(engine, request) for request in requests)) == alone
    assert len({tuple(tokens) for tokens in alone}) == STREAMS


def test_an_answer_has_no_text_and_ends_by_an_end_token_or_its_length(engine, tokenizer):
    tokens = asyncio.run(tokens_of(engine, request_of(tokenizer, "Hello", seed=1)))
    assert tokens[-1] in tokenizer.end_ids
    assert len(tokenizer.to_speech_ids(tokens)) == len(tokens) - 1
    sampling = {"temperature": 10.0, "top_k": 0, "top_p": 1.0, "max_tokens": 100, "min_tokens": 100}
    *first, last = asyncio.run(chunks_of(engine, request_of(tokenizer, "Hello", seed=1, **sampling)))
    assert {chunk.finish_reason for chunk in first} == {None} and last.finish_reason == "length"
    tokens = [token for chunk in (*first, last) for token in chunk.tokens]
    assert len(tokens) == 100 and min(tokens) >= tokenizer.first_speech_id


def test_a_seed_means_the_same_on_each_engine(tokenizer, llm_dir, genai_dir):
    engines = [
        load_engine("cuda", llm_dir, tokenizer, 1, instance_kind="KIND_CPU"),
        load_engine("onnxruntime_genai", genai_dir, tokenizer, 1, instance_kind="KIND_CPU"),
    ]
    sampling = {"temperature": 0.9, "top_k": 25, "top_p": 0.8, "ras_window": 10, "min_tokens": 20, "max_tokens": 20}
    try:
        for seed in range(3):
            request = request_of(tokenizer, "Hello", seed=seed, **sampling)
            first, other = (asyncio.run(tokens_of(engine, request)) for engine in engines)
            assert first == other
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize("prompt", [LLMPrompt("Hello there.", "A reference.", [1, 2, 3]), LLMPrompt("Hello there.")])
async def test_an_answer_in_parts_equals_the_whole_answer(engine, tokenizer, prompt):
    """Greedy, with the default repetition penalty: each part continues the prompt and all parts before it."""

    llm = EngineLM(engine, tokenizer)

    async def speak(generated, max_tokens):
        continued = dataclasses.replace(prompt, generated=tuple(generated))
        answer = llm.generate(continued, Sampling(temperature=0, max_tokens=max_tokens))
        return [token async for chunk in answer for token in chunk.tokens]

    whole = await speak([], 100)
    parts = []
    for _ in range(5):
        parts += await speak(parts, 20)
    assert len(whole) > 40 and parts == whole


async def test_the_loop_is_woken_once_for_all_answers_of_a_step(engine, tokenizer):
    """And all of them arrive: streams that begin together, each with as many answers as the others."""
    loop, calls = asyncio.get_running_loop(), []
    wake = loop.call_soon_threadsafe
    loop.call_soon_threadsafe = lambda *call: calls.append(call) or wake(*call)
    request = request_of(tokenizer, "Hello", seed=1, min_tokens=60, max_tokens=60)
    answers = [await chunks_of(engine, request)]
    alone, calls[:] = len(calls), []
    answers += await asyncio.gather(*(chunks_of(engine, request) for _ in range(STREAMS)))
    assert 0 < len(calls) < alone * STREAMS / 2
    assert all(sum(len(chunk.tokens) for chunk in chunks) == 60 for chunks in answers)


async def test_two_hundred_cancellations_leave_no_live_request(engine, tokenizer):
    for i in range(200):
        while engine.live == STREAMS:
            await asyncio.sleep(0.001)
        task = asyncio.create_task(tokens_of(engine, request_of(tokenizer, "Hello", seed=i, min_tokens=700)))
        await asyncio.sleep(0.002 * (i % 5))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.to_thread(until, lambda: engine.live == 0)
    assert len(await tokens_of(engine, request_of(tokenizer, "Hello", seed=1, max_tokens=5))) == 5


class Ending(ThreadedEngine[Generation]):
    """Ends at its first step."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__(4, [], H200.llm)
        self._reason = reason

    def _accept(self, request: GenerationRequest, on_tokens: OnTokens) -> Generation:
        return Generation(request, on_tokens)

    def step(self) -> float:
        raise self._reason


class Odd(BaseException):
    pass


@pytest.mark.parametrize("reason", [RuntimeError("a bug"), SystemExit(3), KeyboardInterrupt(), Odd("odd")])
def test_whatever_ends_the_thread_answers_all_requests_and_is_reported(reason, published, caplog) -> None:
    engine = Ending(reason)
    engine.start()
    request = GenerationRequest(np.zeros(1, np.int64), Sampling(), (1,))

    for _ in range(2):  # the one that was being served, and a later one
        with pytest.raises(FatalError, match=type(reason).__name__):
            asyncio.run(asyncio.wait_for(chunks_of(engine, request), 10))
    assert "the LLM engine failed" in caplog.text
    health = Health()
    health.suspect()
    health.test_if_due(lambda: asyncio.run(chunks_of(engine, request)), "tensorrt_llm")
    assert type(reason).__name__ in reported_failures(published)["tensorrt_llm"]
    engine.close()
