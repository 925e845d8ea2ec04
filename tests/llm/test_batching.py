"""The engine's bookkeeping, with a fake model whose next token is the last one plus one."""

import asyncio
import threading

import numpy as np
import pytest
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.engines.batching_engine import BatchingEngine
from cosyvoice_triton.llm.engines.interface import GenerationRequest
from cosyvoice_triton.llm.interface import Sampling
from cosyvoice_triton.profiles import LLMNumbers

from tests.support.llm_fixtures import chunks_of
from tests.support.waiting import until

VOCAB = 100
CONTEXT = 50
END = 99


class CountingModel:
    """Each row stores its last token, so mixed-up rows give wrong tokens."""

    context = CONTEXT
    vocab_size = VOCAB
    logit_ids = np.arange(VOCAB)

    def __init__(self, rows: int) -> None:
        self.last = np.zeros(rows, np.int64)
        self.lengths = np.zeros(rows, np.int64)
        self.gate, self.held = threading.Event(), threading.Event()
        self.gate.set()
        self.unreadable = -1  # prompts that end with this token
        self.poison = -1  # logits after this token are NaN

    def prefill(self, row, input_ids):
        if input_ids[-1] == self.unreadable:
            raise OSError("a bad prompt")
        self.last[row], self.lengths[row] = input_ids[-1], len(input_ids)
        return self._logits(self.last[row : row + 1])[0]

    def decode(self, tokens, lengths):
        if not self.gate.is_set():
            self.held.set()
            self.gate.wait(60)
        rows = slice(0, len(tokens))
        assert (tokens == self.last[rows] + 1).all()
        assert (lengths == self.lengths[rows] + 1).all()
        self.last[rows], self.lengths[rows] = tokens, lengths
        logits = self._logits(tokens)
        logits[tokens == self.poison] = np.nan
        return logits

    def move(self, source, target, length):
        assert length == self.lengths[source]
        self.last[target], self.lengths[target] = self.last[source], length

    def _logits(self, tokens):
        return 100.0 * np.eye(VOCAB, dtype=np.float32)[tokens + 1]


@pytest.fixture
def model():
    return CountingModel(4)


@pytest.fixture
def engine(model):
    engine = BatchingEngine(model, np.zeros(VOCAB, np.float32), 4, LLMNumbers())
    engine.start()
    yield engine
    model.gate.set()
    engine.close()


def make_request(*input_ids, max_tokens=10, min_tokens=0):
    greedy = Sampling(temperature=0, repetition_penalty=1.0, max_tokens=max_tokens, min_tokens=min_tokens)
    return GenerationRequest(np.array(input_ids, np.int64), greedy, (END,))


async def collect(engine, request):
    chunks = await chunks_of(engine, request)
    return [token for chunk in chunks for token in chunk.tokens], chunks[-1].finish_reason


def together(engine, *requests):
    async def run():
        return await asyncio.gather(*(collect(engine, each) for each in requests), return_exceptions=True)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request(), "input_ids is empty"),
        (make_request(1, VOCAB), "input_ids holds 100, outside the vocabulary 0..99"),
        (make_request(-1), "input_ids holds -1"),
        (make_request(*[1] * 41), "41 prompt tokens and 10 new ones exceed the LLM's context of 50"),
    ],
)
def test_a_request_that_cannot_be_served_is_an_error_with_the_value(engine, request_, message):
    with pytest.raises(ValueError, match=message):
        engine.submit(request_, lambda item: None)
    assert engine.live == 0


async def test_a_cancelled_request_frees_its_capacity_at_once(model, engine):
    model.gate.clear()
    live = [engine.submit(make_request(1), lambda item: None) for _ in range(4)]
    await asyncio.to_thread(model.held.wait, 60)
    with pytest.raises(UnavailableError, match="maximum of 4 requests"):
        engine.submit(make_request(1), lambda item: None)
    live[1].cancel()
    another = asyncio.create_task(collect(engine, make_request(50, max_tokens=3)))
    await asyncio.sleep(0)  # it has been accepted
    model.gate.set()
    assert await another == ([51, 52, 53], "length")


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_row_without_finite_logits_ends_alone(model, engine, row, temperature):
    model.poison = 10 * row + 2  # sampled second in that row
    sampling = Sampling(temperature=temperature, repetition_penalty=1.0, max_tokens=5)
    results = together(engine, *(GenerationRequest(np.array([10 * i]), sampling, (END,)) for i in range(3)))
    assert isinstance(results[row], FloatingPointError)
    del results[row]
    assert [tokens for tokens, _ in results] == [[10 * i + n for n in range(1, 6)] for i in range(3) if i != row]
    assert asyncio.run(collect(engine, make_request(40))) and engine.live == 0


def test_a_prompt_that_cannot_be_read_ends_alone(model, engine):
    model.unreadable = 20
    first, bad, last = together(engine, *(make_request(10 * i, max_tokens=5) for i in (1, 2, 3)))
    assert isinstance(bad, OSError)
    assert first[0] == [11, 12, 13, 14, 15] and last[0] == [31, 32, 33, 34, 35]


async def test_closing_the_engine_fails_live_requests(model, engine):
    model.gate.clear()
    live = asyncio.create_task(collect(engine, make_request(1)))
    await asyncio.to_thread(model.held.wait, 60)
    closing = asyncio.create_task(asyncio.to_thread(engine.close))
    await asyncio.to_thread(until, lambda: engine._failure)  # the thread is still held
    model.gate.set()
    await closing
    (error,) = await asyncio.wait_for(asyncio.gather(live, return_exceptions=True), 5)
    assert isinstance(error, UnavailableError)
    assert engine.live == 0


def test_a_callback_that_fails_does_not_affect_other_requests(engine):
    def fail(item):
        raise RuntimeError("Event loop is closed")

    engine.submit(make_request(1), fail)
    assert asyncio.run(collect(engine, make_request(5, max_tokens=2))) == ([6, 7], "length")
