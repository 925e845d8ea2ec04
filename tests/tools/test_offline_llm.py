"""The LLM backends of the offline tools: transformers, this project's engines, servers. The GPU engines are fakes."""

import asyncio
import signal

import numpy as np
import pytest
import torch
from cosyvoice_triton.constants import SPEECH_VOCAB
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.interface import LengthRatios, LLMPrompt, Sampling, TokenChunk, TokenStream
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.offline.batch_lm import GeneratedTokens
from cosyvoice_triton.offline.llm import StreamedLM, connect, engine_dir, load_llm

from tests.support.failing_llm import TOKENS, failing_llm
from tests.support.llm_fixtures import genai_dir, install, llm_dir  # noqa: F401
from tests.support.offline_fixtures import GPU_ENGINES, one_thread  # noqa: F401

PROMPTS = [
    LLMPrompt("Hello."),
    LLMPrompt("A longer sentence, which needs no padding.", "What was said.", [5, 17, 300, 5000]),
    LLMPrompt("你好，请问你叫什么？"),
]
GREEDY = Sampling(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def tokenizer(llm_dir):  # noqa: F811
    return LLMTokenizer.from_dir(llm_dir)


@pytest.fixture
def backend(llm_dir, genai_dir, tokenizer):  # noqa: F811
    """`backend("hf", 2)`: a backend in this process with that batch size."""
    opened = []

    def load(name: str, batch_size: int):
        directory = engine_dir(name, llm_dir, genai_dir if name == "onnxruntime_genai" else None)
        opened.append(load_llm(name, llm_dir, directory, tokenizer, batch_size, "cpu"))
        return opened[-1]

    yield load
    for llm in opened:
        llm.close()
        llm.close()  # has no effect


def speech_ids(answers):
    assert all(isinstance(answer, GeneratedTokens) for answer in answers), answers
    return [answer.tokens.tolist() for answer in answers]


def test_greedy_decoding_gives_equal_tokens_in_transformers_and_the_cpu_engine(backend):
    assert speech_ids(backend("hf", 2).generate(PROMPTS, GREEDY)) == speech_ids(
        backend("onnxruntime_genai", 2).generate(PROMPTS, GREEDY)
    )


@pytest.mark.slow
def test_transformers_generates_only_speech_tokens_within_the_length_limits_of_each_text(backend, tokenizer):
    sampling = Sampling(seed=3, temperature=2.0, top_k=0, top_p=1.0, repetition_penalty=1.0)
    answers = backend("hf", 3).generate(PROMPTS, sampling)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        bound = LengthRatios().bound(sampling, prompt, tokenizer.text_length(prompt.target_text))
        assert bound.min_tokens <= len(answer.tokens) <= bound.max_tokens
        assert answer.finish_reason == "stop" or len(answer.tokens) == bound.max_tokens
        assert answer.tokens.min() >= 0 and answer.tokens.max() < SPEECH_VOCAB
    assert len({len(answer.tokens) for answer in answers}) > 1


def test_a_seed_makes_speech_reproducible_without_changing_the_global_seed(backend):
    llm, sampling = backend("hf", 3), Sampling(seed=3, max_tokens=20)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert speech_ids(llm.generate(PROMPTS, sampling)) == speech_ids(llm.generate(PROMPTS, sampling))
    assert torch.rand(1) == expected


@pytest.mark.parametrize("name", ["hf", "onnxruntime_genai"])
def test_only_a_prompt_longer_than_the_context_fails(backend, name):
    endless = LLMPrompt("Hello.", "", [1] * 5000)
    first, second, third = backend(name, 2).generate([PROMPTS[0], endless, PROMPTS[2]], GREEDY)
    assert isinstance(second, ValueError) and "exceed the LLM's context" in str(second)
    assert speech_ids([first, third]) == speech_ids(backend(name, 2).generate([PROMPTS[0], PROMPTS[2]], GREEDY))


def test_transformers_refuses_unsupported_sampling(backend):
    (answer,) = backend("hf", 1).generate(PROMPTS[:1], Sampling(ras_window=10))
    assert "ras_window 10" in str(answer)


@pytest.mark.parametrize("name", sorted(GPU_ENGINES))
def test_gpu_engines_generate_one_batch_at_a_time(name, backend, tokenizer, install, monkeypatch):  # noqa: F811
    fake = install(GPU_ENGINES[name])
    monkeypatch.setattr(fake, "FIRST_ID", tokenizer.first_speech_id)
    llm = backend(name, 2)
    answers = llm.generate(PROMPTS, Sampling(max_tokens=9))  # one more than fit at once
    assert speech_ids(answers) == [list(range(9))] * 3
    assert {answer.finish_reason for answer in answers} == {"length"}
    monkeypatch.setattr(fake, "FIRST_ID", 0)
    for answer in llm.generate(PROMPTS, Sampling(max_tokens=9)):
        assert isinstance(answer, UnavailableError) and "returned no speech token for the text" in str(answer)


@pytest.mark.parametrize("path", ["", "/v1", "/v1/chat/completions"])
def test_the_address_of_a_server_may_have_a_path(path, tokenizer):
    with failing_llm() as server:
        llm = connect(server.url + path, "cosyvoice2", tokenizer, batch_size=2)
        answers = llm.generate(PROMPTS, Sampling())
        llm.close()
    assert speech_ids(answers) == [np.arange(0, 7 * TOKENS, 7).tolist()] * 3


@pytest.mark.parametrize(
    ("mode", "message"), [("error 500", "HTTP 500"), ("ends in the middle", "ended in the middle of an answer")]
)
def test_an_error_of_the_server_is_returned_for_each_prompt(mode, message, tokenizer):
    with failing_llm() as server:
        llm = connect(server.url, "cosyvoice2", tokenizer, batch_size=2)
        server.mode = mode
        failed = llm.generate(PROMPTS, Sampling())
        server.mode = "good"
        good = llm.generate(PROMPTS, Sampling())
        llm.close()
    assert [message in str(answer) and isinstance(answer, UnavailableError) for answer in failed] == [True] * 3
    assert len(speech_ids(good)) == 3


def test_a_server_that_stalls_is_an_error_after_a_timeout(tokenizer, monkeypatch):
    monkeypatch.setattr("cosyvoice_triton.offline.llm.SILENT_SECONDS", 0.5)
    with failing_llm() as server:
        server.mode = "goes silent"
        llm = connect(server.url, "cosyvoice2", tokenizer, batch_size=3)
        answers = llm.generate(PROMPTS, Sampling())
        llm.close()
    assert all(isinstance(answer, UnavailableError) for answer in answers)


def test_an_interrupted_batch_leaves_nothing_running():
    ended = []

    class Endless:
        def generate(self, prompt, sampling):
            return TokenStream(self._generate(prompt))

        async def _generate(self, prompt):
            try:
                yield TokenChunk([1])
                if prompt is PROMPTS[2]:
                    signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(60)
            finally:
                ended.append(prompt)

        async def aclose(self):
            ended.append("connections")

    llm = StreamedLM(Endless(), concurrency=3)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, Sampling())
    llm.close()
    assert len(ended) == 4 and ended[-1] == "connections"
