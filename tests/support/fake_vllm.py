"""A strict fake of vLLM: the names, arguments and behaviour that the library relies on, taken from vLLM 0.25.1.

What vLLM would reject fails here too: unknown arguments, another kind of prompt, an id that is in use.
"""

import asyncio
import enum
from collections import namedtuple
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import make_dataclass
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any


def options(name: str, *required: str, **defaults: Any) -> Any:
    """A class of arguments by name, which takes no others."""
    return make_dataclass(name, [*required, *((key, Any, value) for key, value in defaults.items())], kw_only=True)


def modules_of(members: Mapping[str, Mapping[str, Any]]) -> dict[str, ModuleType]:
    """Modules by name, with the packages that they are in. members: what each has."""
    made: dict[str, ModuleType] = {}
    for name, contents in members.items():
        for module in accumulate(name.split("."), "{}.{}".format):
            made.setdefault(module, ModuleType(module))
        vars(made[name]).update(contents)
    return made


RequestOutputKind = enum.Enum("RequestOutputKind", "CUMULATIVE DELTA FINAL_ONLY")
SamplingParams = options(
    "SamplingParams", temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, frequency_penalty=0.0, presence_penalty=0.0,
    repetition_penalty=1.0, seed=None, min_tokens=0, max_tokens=16, stop_token_ids=None, detokenize=True,
    output_kind=RequestOutputKind.CUMULATIVE, extra_args=None,
)  # fmt: skip
AsyncEngineArgs = options(
    "AsyncEngineArgs", "model", skip_tokenizer_init=False, generation_config="auto", max_model_len=None,
    max_num_seqs=None, gpu_memory_utilization=0.9, compilation_config=None, logits_processors=None,
    disable_log_stats=False,
)  # fmt: skip
# Changes of a batch: removed indices; (index, params, prompt ids, output ids so far); (from, to, swapped).
BatchUpdate = namedtuple("BatchUpdate", "removed added moved")


class EngineDeadError(Exception):
    """As in vllm.v1.engine.exceptions."""


class EngineGenerateError(Exception):
    """As in vllm.v1.engine.exceptions."""


class AsyncLLM:
    """Generates 7, 8, 9, ... in groups of two up to max_tokens. Who closes the generator early aborts the request."""

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments
        self.live: dict[str, Any] = {}
        self.fails: Exception | None = None
        self.is_shut_down = False

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> "AsyncLLM":
        return cls(engine_args)

    async def generate(
        self, prompt: dict[str, list[int]], sampling_params: Any, request_id: str
    ) -> AsyncGenerator[Any, None]:
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
                reason = "length" if begin + 2 >= len(ids) else None
                completion = SimpleNamespace(token_ids=ids[begin : begin + 2], finish_reason=reason)
                yield SimpleNamespace(outputs=[completion])
        finally:
            del self.live[request_id]

    def shutdown(self) -> None:
        self.is_shut_down = True


def process_dict_updates(entries: dict[int, Any], update: Any, new_entry: Callable[..., Any]) -> bool:
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


def modules() -> dict[str, ModuleType]:
    """The modules that the library imports."""
    gpu = SimpleNamespace(get_device_total_memory=lambda device_id=0: 24 << 30)
    sampling = {"RequestOutputKind": RequestOutputKind, "SamplingParams": SamplingParams}
    errors = {"EngineDeadError": EngineDeadError, "EngineGenerateError": EngineGenerateError}
    processors = "vllm.v1.sample.logits_processor"
    return modules_of(
        {
            "vllm": {"SamplingParams": SamplingParams},
            "vllm.config": {"VllmConfig": SimpleNamespace},
            "vllm.engine.arg_utils": {"AsyncEngineArgs": AsyncEngineArgs},
            "vllm.inputs": {"TokensPrompt": dict},
            "vllm.platforms": {"current_platform": gpu},
            "vllm.sampling_params": sampling,
            "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
            "vllm.v1.engine.exceptions": errors,
            processors: {"BatchUpdate": BatchUpdate, "LogitsProcessor": object},
            f"{processors}.builtin": {"process_dict_updates": process_dict_updates},
        }
    )
