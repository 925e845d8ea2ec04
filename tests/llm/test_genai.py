"""The CPU engine: the bookkeeping of batches, with a fake model whose next token is the last one plus one, and a real
converted model; and what every engine with a thread of its own does, with real models on the CPU: batching,
cancellation, seeds, ends."""

import asyncio
import dataclasses
import re
import shutil
import threading
from contextlib import closing

import numpy as np
import pytest
import torch
from cosyvoice_triton.errors import FatalError, UnavailableError
from cosyvoice_triton.llm.engines.genai import BatchingEngine, GenAIModel
from cosyvoice_triton.llm.engines.interface import EngineLM, GenerationRequest, candidate_ids
from cosyvoice_triton.llm.engines.threaded_engine import Generation, OnTokens, ThreadedEngine
from cosyvoice_triton.llm.interface import LLMPrompt, Sampling
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.monitoring.health import Health, reported_failures
from cosyvoice_triton.prepare.genai import convert
from cosyvoice_triton.profiles import H200, LLMNumbers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import Qwen2ForCausalLM

from tests.support.llm_fixtures import chunks_of, load_engine, request_of, tokens_of
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
def batching(model):
    batching = BatchingEngine(model, np.zeros(VOCAB, np.float32), 4, LLMNumbers())
    batching.start()
    yield batching
    model.gate.set()
    batching.close()


def make_request(*input_ids, max_tokens=10, min_tokens=0):
    greedy = Sampling(temperature=0, repetition_penalty=1.0, max_tokens=max_tokens, min_tokens=min_tokens)
    return GenerationRequest(np.array(input_ids, np.int64), greedy, (END,))


async def collect(batching, request):
    chunks = await chunks_of(batching, request)
    return [token for chunk in chunks for token in chunk.tokens], chunks[-1].finish_reason


def together(batching, *requests):
    async def run():
        return await asyncio.gather(*(collect(batching, each) for each in requests), return_exceptions=True)

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
def test_a_request_that_cannot_be_served_is_an_error_with_the_value(batching, request_, message):
    with pytest.raises(ValueError, match=message):
        batching.submit(request_, lambda item: None)
    assert batching.live == 0


async def test_a_cancelled_request_frees_its_capacity_at_once(model, batching):
    model.gate.clear()
    live = [batching.submit(make_request(1), lambda item: None) for _ in range(4)]
    await asyncio.to_thread(model.held.wait, 60)
    with pytest.raises(UnavailableError, match="maximum of 4 requests"):
        batching.submit(make_request(1), lambda item: None)
    live[1].cancel()
    another = asyncio.create_task(collect(batching, make_request(50, max_tokens=3)))
    await asyncio.sleep(0)  # it has been accepted
    model.gate.set()
    assert await another == ([51, 52, 53], "length")


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_row_without_finite_logits_ends_alone(model, batching, row, temperature):
    model.poison = 10 * row + 2  # sampled second in that row
    sampling = Sampling(temperature=temperature, repetition_penalty=1.0, max_tokens=5)
    results = together(batching, *(GenerationRequest(np.array([10 * i]), sampling, (END,)) for i in range(3)))
    assert isinstance(results[row], FloatingPointError)
    del results[row]
    assert [tokens for tokens, _ in results] == [[10 * i + n for n in range(1, 6)] for i in range(3) if i != row]
    assert asyncio.run(collect(batching, make_request(40))) and batching.live == 0


def test_a_prompt_that_cannot_be_read_ends_alone(model, batching):
    model.unreadable = 20
    first, bad, last = together(batching, *(make_request(10 * i, max_tokens=5) for i in (1, 2, 3)))
    assert isinstance(bad, OSError)
    assert first[0] == [11, 12, 13, 14, 15] and last[0] == [31, 32, 33, 34, 35]


async def test_closing_the_engine_fails_live_requests(model, batching):
    model.gate.clear()
    live = asyncio.create_task(collect(batching, make_request(1)))
    await asyncio.to_thread(model.held.wait, 60)
    closing = asyncio.create_task(asyncio.to_thread(batching.close))
    await asyncio.to_thread(until, lambda: batching._failure)  # the thread is still held
    model.gate.set()
    await closing
    (error,) = await asyncio.wait_for(asyncio.gather(live, return_exceptions=True), 5)
    assert isinstance(error, UnavailableError)
    assert batching.live == 0


def test_a_callback_that_fails_does_not_affect_other_requests(batching):
    def fail(item):
        raise RuntimeError("Event loop is closed")

    batching.submit(make_request(1), fail)
    assert asyncio.run(collect(batching, make_request(5, max_tokens=2))) == ([6, 7], "length")


def test_logits_of_a_fp32_conversion_equal_those_of_transformers(genai_dir, llm_dir):
    model = GenAIModel(genai_dir, rows=2, threads=1)
    ids = np.array([3, 300, 40, 777, 1500, 9])
    with torch.no_grad():
        expected = Qwen2ForCausalLM.from_pretrained(llm_dir, dtype=torch.float32)(torch.tensor(ids)[None]).logits[0]
    model.prefill(0, np.array([8, 8, 8]))
    found = [model.prefill(1, ids[:4])]
    model.move(1, 0, 4)
    found += [model.decode(ids[i : i + 1], np.array([i + 1]))[0] for i in (4, 5)]
    assert (model.logit_ids == candidate_ids(LLMTokenizer.from_dir(llm_dir))).all()
    np.testing.assert_allclose(found, expected[3:, model.logit_ids].numpy(), atol=1e-4)


def test_a_directory_that_was_not_converted_is_an_error(llm_dir):
    with pytest.raises(
        ValueError, match="genai_config.json: convert the HuggingFace directory as docs/llm.md describes"
    ):
        GenAIModel(llm_dir, rows=1)


def test_a_model_of_values_that_are_no_numbers_is_an_error(genai_dir, tmp_path):
    shutil.copytree(genai_dir, tmp_path / "nan")
    weights = tmp_path / "nan" / "model.onnx.data"
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    with pytest.raises(ValueError, match=r"model\.onnx: its logits are not finite"):
        GenAIModel(tmp_path / "nan", rows=1, threads=1)


def test_a_checkpoint_without_speech_tokens_is_not_converted(llm_dir, tmp_path):
    shutil.copytree(llm_dir, tmp_path / "text")
    (tmp_path / "text" / "tokenizer.json").write_text(Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).to_str())
    with pytest.raises(ValueError, match=re.escape("has no token <|s_0|>: not the tokenizer of a CosyVoice LLM")):
        convert(tmp_path / "text", tmp_path / "out", "int4")


@pytest.mark.slow
def test_the_bias_of_the_output_head_is_kept(llm_dir, genai_dir, tmp_path):
    """Qwen2 has no such bias, so transformers and the model builder drop it. This one is large beside rounding."""
    shutil.copytree(llm_dir, tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    bias = 1e4 * torch.randn(len(weights["lm_head.weight"]), generator=torch.Generator().manual_seed(0))
    save_file(weights | {"lm_head.bias": bias}, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    parts: list[str] = []
    convert(tmp_path / "hf", tmp_path / "with", "int4", parts.append)
    found = re.findall(r"reading layer \d+|reading lm head|saving|quantising", " ".join(parts))
    assert found[0] == "reading layer 0" and {"reading lm head", "quantising", "saving"} < set(found)
    assert len(parts) == len(found) == len(set(found))
    ids = np.array([3, 300, 40])
    biased, plain = (GenAIModel(of, rows=1, threads=1) for of in (tmp_path / "with", genai_dir))
    difference = biased.prefill(0, ids) - plain.prefill(0, ids)
    np.testing.assert_allclose(difference, bias[biased.logit_ids].numpy(), atol=10.0)


def test_converting_an_empty_directory_is_one_clear_error_and_leaves_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is not a HuggingFace model directory"):
        convert(tmp_path / "empty", tmp_path / "out", "int4")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_conversion_that_fails_midway_leaves_nothing(tmp_path, llm_dir, monkeypatch):
    monkeypatch.setattr("sys.executable", "false")
    with pytest.raises(RuntimeError, match="the model builder exited with 1"):
        convert(llm_dir, tmp_path / "out", "int4")
    assert list(tmp_path.iterdir()) == []


AT_ONCE = 8


@pytest.fixture(params=["onnxruntime_genai", "cuda"])
def engine(request, tokenizer):
    directory = request.getfixturevalue("llm_dir" if request.param == "cuda" else "genai_dir")
    engine = load_engine(request.param, directory, tokenizer, AT_ONCE, instance_kind="KIND_CPU")
    yield engine
    engine.close()


async def test_eight_concurrent_requests_get_the_same_tokens_as_alone(engine, tokenizer):
    sampling = [{"seed": i, "temperature": 0.5 + 0.2 * i, "top_k": 5 * i} for i in range(AT_ONCE)]
    requests = [request_of(tokenizer, "text " * (i + 1), **of) for i, of in enumerate(sampling)]
    alone = [await tokens_of(engine, request) for request in requests]
    assert await asyncio.gather(*(tokens_of(engine, request) for request in requests)) == alone
    assert len({tuple(tokens) for tokens in alone}) == AT_ONCE


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
    sampling = {"temperature": 0.9, "top_k": 25, "top_p": 0.8, "ras_window": 10, "min_tokens": 20, "max_tokens": 20}
    requests = [request_of(tokenizer, "Hello", seed=seed, **sampling) for seed in range(3)]
    answers = []
    for name, directory in (("cuda", llm_dir), ("onnxruntime_genai", genai_dir)):
        with closing(load_engine(name, directory, tokenizer, 1, instance_kind="KIND_CPU")) as engine:
            answers.append([asyncio.run(tokens_of(engine, request)) for request in requests])
    assert answers[0] == answers[1]


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
    answers += await asyncio.gather(*(chunks_of(engine, request) for _ in range(AT_ONCE)))
    assert 0 < len(calls) < alone * AT_ONCE / 2
    assert all(sum(len(chunk.tokens) for chunk in chunks) == 60 for chunks in answers)


async def test_two_hundred_cancellations_leave_no_live_request(engine, tokenizer):
    for i in range(200):
        while engine.live == AT_ONCE:
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
