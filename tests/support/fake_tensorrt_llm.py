"""A strict fake of TensorRT-LLM's LLM API: the parts that the library relies on, taken from its sources (1.x)."""

import asyncio
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.support.fake_vllm import modules_of, options

KvCacheConfig = options("KvCacheConfig", free_gpu_memory_fraction=None)
SAMPLING: Any = options(
    "SAMPLING", end_id=None, pad_id=None, max_tokens=32, stop_token_ids=None, embedding_bias=None, top_k=None,
    top_p=None, seed=None, temperature=None, min_tokens=None, repetition_penalty=None, detokenize=True,
)  # fmt: skip


class SamplingParams(SAMPLING):
    def __post_init__(self) -> None:
        assert self.temperature is None or self.temperature > 0
        assert self.embedding_bias is None or self.embedding_bias.dtype == torch.float32


class RequestOutput:
    """Generates 7, 8, 9, ... one by one: each is the news of its only output, as in TensorRT-LLM."""

    def __init__(self, llm: "LLM", sampling: Any) -> None:
        self.outputs = [SimpleNamespace(token_ids_diff=[], finish_reason=None)]
        self.sampling, self._llm = sampling, llm
        llm.live.add(self)

    def abort(self) -> None:
        assert self in self._llm.live, "in TensorRT-LLM, aborting a finished request has no effect"
        self._llm.live.discard(self)

    async def __aiter__(self) -> AsyncIterator["RequestOutput"]:
        (output,) = self.outputs
        for count in range(1, self.sampling.max_tokens + 1):
            await asyncio.sleep(0)
            if self._llm.fails:
                raise self._llm.fails
            output.token_ids_diff = [6 + count]
            if count == self.sampling.max_tokens:
                output.finish_reason = "length"
                self._llm.live.discard(self)
            yield self


class LLM:
    def __init__(
        self,
        model: str,
        *,
        skip_tokenizer_init: bool = False,
        kv_cache_config: Any = None,
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        self.kv_cache_config = kv_cache_config
        self.live: set[RequestOutput] = set()
        self.requests: list[RequestOutput] = []
        self.fails: Exception | None = None  # raised while generating
        self.refuses: Exception | None = None  # raised when a request is submitted
        self.is_shut_down = False

    def generate_async(self, inputs: list[int], sampling_params: Any, *, streaming: bool = False) -> RequestOutput:
        assert streaming and all(type(token) is int for token in inputs)
        if self.refuses:
            raise self.refuses
        self.requests.append(RequestOutput(self, sampling_params))
        return self.requests[-1]

    def shutdown(self) -> None:
        self.is_shut_down = True


class BuiltLLM(LLM):
    """`tensorrt_llm._tensorrt_engine.LLM`, which serves built engines."""


def modules() -> dict[str, ModuleType]:
    """The modules that the library imports."""
    return modules_of(
        {
            "tensorrt_llm": {"LLM": LLM, "SamplingParams": SamplingParams},
            "tensorrt_llm.llmapi": {"KvCacheConfig": KvCacheConfig},
            "tensorrt_llm._tensorrt_engine": {"LLM": BuiltLLM},
        }
    )
