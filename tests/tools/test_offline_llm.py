"""The LLM of the offline tool: engines in this process, servers. The GPU engines are fakes."""

import asyncio
import signal
from pathlib import Path

import numpy as np
import pytest
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.interface import LLMPrompt, Sampling, TokenChunk, TokenStream
from cosyvoice_triton.offline.llm import GeneratedTokens, OfflineLLM, connect, engine_of, load_llm

from tests.support.failing_llm import TOKENS, failing_llm
from tests.support.offline_fixtures import GPU_ENGINES

PROMPTS = [
    LLMPrompt("Hello."),
    LLMPrompt("A longer sentence, which needs no padding.", "What was said.", [5, 17, 300, 5000]),
    LLMPrompt("你好，请问你叫什么？"),
]
GREEDY = Sampling(temperature=0, max_tokens=24)


@pytest.fixture
def backend(llm_dir, genai_dir, tokenizer):
    """`backend("hf", 2)`: a backend in this process with that batch size."""
    opened = []

    def load(name: str, batch_size: int):
        engine, directory = engine_of(name, llm_dir, genai_dir if name == "hf" else None, "cpu")
        opened.append(load_llm(engine, directory, tokenizer, batch_size))
        return opened[-1]

    yield load
    for llm in opened:
        llm.close()
        llm.close()  # has no effect


def speech_ids(answers):
    assert all(isinstance(answer, GeneratedTokens) for answer in answers), answers
    return [answer.tokens.tolist() for answer in answers]


@pytest.mark.parametrize(
    "backend, device, engine, directory",
    [
        ("hf", "cpu", "onnxruntime_genai", "given"),
        ("hf", "cuda", "cuda", "llm"),
        ("vllm", "cuda", "vllm", "given"),
        ("trtllm", "cuda", "tensorrt_llm", "given"),
    ],
)
def test_each_backend_has_an_engine_and_its_directory(backend, device, engine, directory):
    assert engine_of(backend, Path("llm"), Path("given"), device) == (engine, Path(directory))
    assert engine_of("hf", Path("llm"), None, "cpu")[1] == Path("llm_genai")


def test_only_a_prompt_longer_than_the_context_fails(backend):
    endless = LLMPrompt("Hello.", "", [1] * 5000)
    first, second, third = backend("hf", 2).generate([PROMPTS[0], endless, PROMPTS[2]], GREEDY)
    assert isinstance(second, ValueError) and "exceed the LLM's context" in str(second)
    assert speech_ids([first, third]) == speech_ids(backend("hf", 2).generate([PROMPTS[0], PROMPTS[2]], GREEDY))


@pytest.mark.parametrize("name", sorted(GPU_ENGINES))
def test_gpu_engines_generate_one_batch_at_a_time(name, backend, tokenizer, install, monkeypatch):
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

    llm = OfflineLLM(Endless(), concurrency=3)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, Sampling())
    llm.close()
    assert len(ended) == 4 and ended[-1] == "connections"
