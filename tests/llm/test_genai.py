"""The CPU engine with a real converted model: batching, cancellation, seeds, and the conversion itself."""

import asyncio
import dataclasses
import shutil
import time
from contextlib import aclosing

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import Qwen2ForCausalLM

from common.errors import UnavailableError
from common.llm.engines.batching import BatchingEngine
from common.llm.engines.genai import GenAIModel, load_engine
from common.llm.engines.interface import EngineLM, GenerationRequest, candidate_ids
from common.llm.interface import LLMPrompt, Sampling
from common.llm.speech_tokens import LLMTokenizer
from scripts.convert_genai import main
from tests.support.llm_fixtures import genai_dir, llm_dir  # noqa: F401
from tools.prepare.genai import convert

STREAMS = 8


@pytest.fixture(scope="module")
def tokenizer(llm_dir):  # noqa: F811
    return LLMTokenizer.from_dir(llm_dir)


@pytest.fixture
def engine(genai_dir, tokenizer):  # noqa: F811
    engine = load_engine(genai_dir, tokenizer, STREAMS)
    yield engine
    engine.close()


def make_request(tokenizer: LLMTokenizer, text: str, **sampling) -> GenerationRequest:
    ids = tokenizer.encode_prompt(LLMPrompt(text))
    return GenerationRequest(ids, Sampling(**sampling), tokenizer.end_ids)


async def tokens_of(engine: BatchingEngine, request: GenerationRequest) -> list[int]:
    return [token async for chunk in engine.generate(request) for token in chunk.tokens]


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_logits_of_a_fp32_conversion_equal_those_of_transformers(genai_dir, llm_dir):  # noqa: F811
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


def test_eight_concurrent_requests_get_the_same_tokens_as_alone(engine, tokenizer):
    requests = [
        make_request(tokenizer, "text " * (i + 1), seed=i, temperature=0.5 + 0.2 * i, top_k=5 * i)
        for i in range(STREAMS)
    ]

    async def together():
        return await asyncio.gather(*(tokens_of(engine, request) for request in requests))

    alone = [asyncio.run(tokens_of(engine, request)) for request in requests]
    assert asyncio.run(together()) == alone
    assert len({tuple(tokens) for tokens in alone}) == STREAMS


def test_the_end_token_is_the_last_one(engine, tokenizer):
    tokens = asyncio.run(tokens_of(engine, make_request(tokenizer, "Hello", seed=1)))
    assert tokens[-1] in tokenizer.end_ids
    assert len(tokenizer.to_speech_ids(tokens)) == len(tokens) - 1


def test_text_is_never_sampled_even_at_a_high_temperature(engine, tokenizer):
    sampling = {"temperature": 10.0, "top_k": 0, "top_p": 1.0, "max_tokens": 100}
    tokens = asyncio.run(tokens_of(engine, make_request(tokenizer, "Hello", seed=1, **sampling)))
    assert min(tokens) >= tokenizer.first_speech_id


def test_a_seed_repeats_the_answer_and_no_seed_does_not(engine, tokenizer):
    def run(seed):
        return asyncio.run(tokens_of(engine, make_request(tokenizer, "Hello", seed=seed)))

    assert run(5) == run(5)
    assert run(5) != run(6)
    assert run(None) != run(None)


@pytest.mark.parametrize("prompt", [LLMPrompt("Hello there.", "A reference.", [1, 2, 3]), LLMPrompt("Hello there.")])
def test_an_answer_in_parts_equals_the_whole_answer(engine, tokenizer, prompt):
    """Greedy, with the default repetition penalty: each part continues the prompt and all parts before it."""

    llm = EngineLM(engine, tokenizer)

    async def speak(generated, max_tokens):
        continued = dataclasses.replace(prompt, generated=tuple(generated))
        answer = llm.generate(continued, Sampling(temperature=0, max_tokens=max_tokens))
        return [token async for tokens in answer for token in tokens]

    whole = asyncio.run(speak([], 100))
    parts = []
    for _ in range(5):
        parts += asyncio.run(speak(parts, 20))
    assert len(whole) > 40 and parts == whole


def test_max_tokens_ends_a_request_with_the_reason(engine, tokenizer):
    async def run():
        return [chunk async for chunk in engine.generate(make_request(tokenizer, "Hello", seed=1, max_tokens=5))]

    chunks = asyncio.run(run())
    assert [chunk.finish_reason for chunk in chunks] == [None] * 4 + ["length"]


def test_closing_the_stream_frees_the_request(engine, tokenizer):
    async def first_chunk():
        async with aclosing(engine.generate(make_request(tokenizer, "Hello"))) as chunks:
            await anext(chunks)

    asyncio.run(first_chunk())
    wait_until(lambda: engine.live == 0)


def test_two_hundred_cancellations_leave_no_live_request(engine, tokenizer):
    async def cancelled(i):
        task = asyncio.create_task(tokens_of(engine, make_request(tokenizer, "Hello", seed=i, min_tokens=700)))
        await asyncio.sleep(0.002 * (i % 5))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def run():
        for i in range(200):
            while engine.live == STREAMS:
                await asyncio.sleep(0.001)
            await cancelled(i)

    asyncio.run(run())
    wait_until(lambda: engine.live == 0)
    assert len(asyncio.run(tokens_of(engine, make_request(tokenizer, "Hello", seed=1, max_tokens=5)))) == 5


def test_one_request_too_many_is_rejected_at_once(engine, tokenizer):
    generations = [engine.submit(make_request(tokenizer, "Hello"), lambda item: None) for _ in range(STREAMS)]
    with pytest.raises(UnavailableError, match=f"maximum of {STREAMS} requests"):
        engine.submit(make_request(tokenizer, "Hello"), lambda item: None)
    for generation in generations:
        generation.cancel()
    wait_until(lambda: engine.live == 0)


def test_a_directory_that_was_not_converted_is_an_error(llm_dir):  # noqa: F811
    with pytest.raises(
        ValueError, match="genai_config.json: convert the HuggingFace directory as docs/llm.md describes"
    ):
        GenAIModel(llm_dir, rows=1)


def test_a_model_without_the_tokenizers_speech_tokens_is_an_error(genai_dir, tokenizer):  # noqa: F811
    larger = dataclasses.replace(tokenizer, first_speech_id=tokenizer.first_speech_id + 10_000)
    with pytest.raises(
        ValueError, match="vocabulary of 6826, too small for the tokenizer's speech and end tokens 10260"
    ):
        load_engine(genai_dir, larger, 1)


def test_a_checkpoint_without_speech_tokens_is_not_converted(llm_dir, tmp_path, capfd):  # noqa: F811
    shutil.copytree(llm_dir, tmp_path / "text")
    (tmp_path / "text" / "tokenizer.json").write_text(Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).to_str())
    assert main(["--model-dir", str(tmp_path / "text"), "--output-dir", str(tmp_path / "out")]) == 1
    assert "has no token <|s_0|>: not the tokenizer of a CosyVoice2 LLM" in capfd.readouterr().err


@pytest.mark.slow
def test_the_bias_of_the_output_head_is_kept(llm_dir, tmp_path):  # noqa: F811
    """Qwen2 has no such bias, so transformers and the model builder drop it."""
    shutil.copytree(llm_dir, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "without", "int4")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    bias = torch.randn(len(weights["lm_head.weight"]), generator=torch.Generator().manual_seed(0))
    save_file(weights | {"lm_head.bias": bias}, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    convert(tmp_path / "hf", tmp_path / "with", "int4")
    ids = np.array([3, 300, 40])
    with_, without = (GenAIModel(tmp_path / name, rows=1, threads=1) for name in ("with", "without"))
    difference = with_.prefill(0, ids) - without.prefill(0, ids)
    np.testing.assert_allclose(difference, bias[with_.logit_ids].numpy(), atol=1e-5)


def test_converting_an_empty_directory_is_one_clear_error_and_leaves_nothing(tmp_path, capfd):
    (tmp_path / "empty").mkdir()
    assert main(["--model-dir", str(tmp_path / "empty"), "--output-dir", str(tmp_path / "out")]) == 1
    assert "is not a HuggingFace model directory" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.slow
def test_a_conversion_that_fails_midway_leaves_nothing(tmp_path, capfd, llm_dir):  # noqa: F811
    (tmp_path / "broken").mkdir()
    shutil.copy(llm_dir / "tokenizer.json", tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "none"}')
    assert main(["--model-dir", str(tmp_path / "broken"), "--output-dir", str(tmp_path / "out")]) == 1
    assert "the model builder exited with" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]
