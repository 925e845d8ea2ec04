"""A strict fake of vLLM: the names, signatures and behaviour that the library relies on, taken from vLLM 0.25.1.

What vLLM would reject fails here too: unknown arguments, another kind of prompt, an id that is in use.
"""

import asyncio
import enum
import sys
import types
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, TypedDict


class CudaPlatform:
    """Of a GPU of 24 GiB."""

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return 24 << 30


current_platform = CudaPlatform()


class RequestOutputKind(enum.Enum):
    CUMULATIVE, DELTA, FINAL_ONLY = range(3)


@dataclass(kw_only=True)
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop_token_ids: list[int] | None = None
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    extra_args: dict[str, Any] | None = None


@dataclass
class AsyncEngineArgs:
    model: str
    skip_tokenizer_init: bool = False
    generation_config: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float = 0.9
    compilation_config: dict[str, Any] = field(default_factory=dict)
    logits_processors: list[str] | None = None
    disable_log_stats: bool = False


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


@dataclass
class CompletionOutput:
    token_ids: list[int]
    finish_reason: str | None = None


@dataclass
class RequestOutput:
    outputs: list[CompletionOutput]


class EngineDeadError(Exception):
    """As in vllm.v1.engine.exceptions."""


class EngineGenerateError(Exception):
    """As in vllm.v1.engine.exceptions."""


class AsyncLLM:
    """Generates 7, 8, 9, ... in groups of two up to max_tokens. Who closes the generator early aborts the request."""

    def __init__(self, arguments: AsyncEngineArgs) -> None:
        self.arguments = arguments
        self.live: dict[str, SamplingParams] = {}
        self.fails: Exception | None = None
        self.is_shut_down = False

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> "AsyncLLM":
        return cls(engine_args)

    async def generate(
        self, prompt: TokensPrompt, sampling_params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        assert self.arguments.skip_tokenizer_init and set(prompt) == {"prompt_token_ids"}
        assert sampling_params.output_kind is RequestOutputKind.DELTA and sampling_params.max_tokens is not None
        assert request_id not in self.live
        self.live[request_id] = sampling_params
        ids = list(range(7, 7 + sampling_params.max_tokens))
        try:
            for begin in range(0, len(ids), 2):
                await asyncio.sleep(0)
                if self.fails:
                    raise self.fails
                last = begin + 2 >= len(ids)
                yield RequestOutput([CompletionOutput(ids[begin : begin + 2], "length" if last else None)])
        finally:
            del self.live[request_id]

    def shutdown(self) -> None:
        self.is_shut_down = True


@dataclass
class ModelConfig:
    model: str
    vocab_size: int

    def get_vocab_size(self) -> int:
        return self.vocab_size


@dataclass
class SchedulerConfig:
    max_num_seqs: int


@dataclass
class VllmConfig:
    model_config: ModelConfig
    scheduler_config: SchedulerConfig


@dataclass(frozen=True)
class BatchUpdate:
    """Changes of a batch: removed indices; (index, params, prompt ids, output ids so far); (from, to, swapped)."""

    removed: list[int]
    added: list[tuple[int, SamplingParams, list[int] | None, list[int]]]
    moved: list[tuple[int, int, bool]]


class LogitsProcessor:
    """As in vllm.v1.sample.logits_processor.interface: rows of a batch, which `update_state` changes."""


def process_dict_updates(entries: dict[int, Any], update: BatchUpdate | None, new_entry: Callable[..., Any]) -> bool:
    """As in vLLM: additions first, possibly at an index that was not removed, then removals, then moves."""
    if update is None:
        return False
    for index, params, prompt_ids, output_ids in update.added:
        entries[index] = new_entry(params, prompt_ids, output_ids)
    for index in update.removed:
        entries.pop(index, None)
    for source, target, swapped in update.moved:
        moving, met = entries.pop(source, None), entries.pop(target, None)
        if moving is not None:
            entries[target] = moving
        if met is not None and swapped:
            entries[source] = met
    return True


MODULES = {
    "vllm": ["SamplingParams"],
    "vllm.config": ["VllmConfig"],
    "vllm.engine": [],
    "vllm.engine.arg_utils": ["AsyncEngineArgs"],
    "vllm.inputs": ["TokensPrompt"],
    "vllm.platforms": ["current_platform"],
    "vllm.sampling_params": ["RequestOutputKind", "SamplingParams"],
    "vllm.v1": [],
    "vllm.v1.engine": [],
    "vllm.v1.engine.async_llm": ["AsyncLLM"],
    "vllm.v1.engine.exceptions": ["EngineDeadError", "EngineGenerateError"],
    "vllm.v1.sample": [],
    "vllm.v1.sample.logits_processor": ["BatchUpdate", "LogitsProcessor"],
    "vllm.v1.sample.logits_processor.builtin": ["process_dict_updates"],
}


def modules() -> dict[str, types.ModuleType]:
    """This file's classes under the module names that the library imports."""
    made = {}
    for name, members in MODULES.items():
        made[name] = types.ModuleType(name)
        made[name].__dict__.update({member: getattr(sys.modules[__name__], member) for member in members})
    return made
