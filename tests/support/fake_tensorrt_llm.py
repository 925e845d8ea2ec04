"""A strict fake of TensorRT-LLM's LLM API: the parts that the library relies on, taken from its sources (1.x)."""

import asyncio
import sys
import types
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop_token_ids: list[int] | None = None
    embedding_bias: torch.Tensor | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    detokenize: bool = True

    def __post_init__(self) -> None:
        assert self.temperature is None or self.temperature > 0
        assert self.embedding_bias is None or self.embedding_bias.dtype == torch.float32


@dataclass
class KvCacheConfig:
    free_gpu_memory_fraction: float | None = None


class CompletionOutput:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._last_token_ids_len = 0

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]


class RequestOutput:
    """Generates 7, 8, 9, ... one by one. Its only output grows, as in TensorRT-LLM."""

    def __init__(self, llm: "LLM", sampling: SamplingParams) -> None:
        self.outputs = [CompletionOutput()]
        self.sampling = sampling
        self.aborted = False
        self._llm = llm
        llm.live.add(self)

    def abort(self) -> None:
        assert self in self._llm.live, "in TensorRT-LLM, aborting a finished request has no effect"
        self.aborted = True
        self._llm.live.discard(self)

    async def __aiter__(self) -> AsyncIterator["RequestOutput"]:
        (output,) = self.outputs
        for token in range(7, 7 + self.sampling.max_tokens):
            await asyncio.sleep(0)
            if self._llm.fails:
                raise self._llm.fails
            output._last_token_ids_len = len(output.token_ids)
            output.token_ids.append(token)
            if len(output.token_ids) == self.sampling.max_tokens:
                output.finish_reason = "length"
                self._llm.live.discard(self)
            yield self


class LLM:
    def __init__(
        self,
        model: str,
        *,
        skip_tokenizer_init: bool = False,
        kv_cache_config: KvCacheConfig | None = None,
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        self.options = {"model": model, "max_batch_size": max_batch_size, "max_seq_len": max_seq_len}
        self.kv_cache_config = kv_cache_config
        self.live: set[RequestOutput] = set()
        self.requests: list[RequestOutput] = []
        self.fails: Exception | None = None  # raised while generating
        self.refuses: Exception | None = None  # raised when a request is submitted
        self.is_shut_down = False

    def generate_async(self, inputs: list[int], sampling_params: SamplingParams, *, streaming: bool = False) -> Any:
        assert streaming and all(type(token) is int for token in inputs)
        if self.refuses:
            raise self.refuses
        self.requests.append(RequestOutput(self, sampling_params))
        return self.requests[-1]

    def shutdown(self) -> None:
        self.is_shut_down = True


class BuiltLLM(LLM):
    """`tensorrt_llm._tensorrt_engine.LLM`, which serves built engines."""


def modules() -> dict[str, types.ModuleType]:
    """This file's classes under the module names that the library imports."""
    here = sys.modules[__name__]
    made = {name: types.ModuleType(name) for name in ("tensorrt_llm", "tensorrt_llm.llmapi")}
    made["tensorrt_llm._tensorrt_engine"] = types.ModuleType("tensorrt_llm._tensorrt_engine")
    made["tensorrt_llm"].__dict__.update(LLM=here.LLM, SamplingParams=here.SamplingParams)
    made["tensorrt_llm.llmapi"].__dict__.update(KvCacheConfig=here.KvCacheConfig)
    made["tensorrt_llm._tensorrt_engine"].__dict__.update(LLM=here.BuiltLLM)
    return made
