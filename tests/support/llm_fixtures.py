"""Fixtures of the LLM's tests: fakes of the GPU engines, and the random demo LLM as a HuggingFace directory and
converted for the CPU engine, each built once per test run.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cosyvoice_triton.config import LLMEngine, TensorrtLLMConfig
from cosyvoice_triton.llm.engines.interface import Engine, GenerationRequest
from cosyvoice_triton.llm.engines.loading import engine_of
from cosyvoice_triton.llm.interface import LLMPrompt, Sampling, TokenChunk
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.prepare.genai import convert

from tests.random_weights.llm import make_llm
from tests.support import fake_tensorrt_llm, fake_vllm
from tests.support.shared import made_once

FAKES = {"vllm": fake_vllm, "tensorrt_llm": fake_tensorrt_llm}
ENGINE_MODULES = (
    "cosyvoice_triton.llm.engines.vllm",
    "cosyvoice_triton.llm.vllm_logits",
    "cosyvoice_triton.llm.engines.trtllm",
)  # they import the fakes


def request_of(tokenizer: LLMTokenizer, text: str = "Hello", **sampling: Any) -> GenerationRequest:
    return GenerationRequest(tokenizer.encode_prompt(LLMPrompt(text)), Sampling(**sampling), tokenizer.end_ids)


def load_engine(name: LLMEngine, directory: Path, tokenizer: LLMTokenizer, max_requests: int, **settings: Any) -> Any:
    config = TensorrtLLMConfig(engine_dir=str(directory), engine=name, max_requests=max_requests, **settings)
    return engine_of(config, tokenizer)


async def chunks_of(engine: Engine, request: GenerationRequest) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(request)]


async def tokens_of(engine: Engine, request: GenerationRequest) -> list[int]:
    return [token for chunk in await chunks_of(engine, request) for token in chunk.tokens]


def shared_llm(factory: pytest.TempPathFactory) -> Path:
    return made_once(factory, "cosyvoice2_llm", make_llm)


def shared_genai(factory: pytest.TempPathFactory) -> Path:
    return made_once(factory, "cosyvoice2_llm_genai", lambda directory: convert(shared_llm(factory), directory, "fp32"))


@pytest.fixture(scope="session")
def llm_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_llm(tmp_path_factory)


@pytest.fixture(scope="session")
def genai_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_genai(tmp_path_factory)


@pytest.fixture(scope="session")
def tokenizer(llm_dir: Path) -> LLMTokenizer:
    return LLMTokenizer.from_dir(llm_dir)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """`install("vllm")` makes the fake importable and returns it. The library's modules that import it are unloaded
    after the test."""

    def run(name: str) -> ModuleType:
        for module, content in FAKES[name].modules().items():
            monkeypatch.setitem(sys.modules, module, content)
        return FAKES[name]

    yield run
    for module in ENGINE_MODULES:
        sys.modules.pop(module, None)
