"""The settings of each model, parsed once from the arguments that Triton hands to `initialize`.

The dataclass defaults are the one home of every default: `rendering` fills the templates from them. A key that is
unknown, unfilled (`${key}`) or that cannot be parsed is a ValueError naming the key and its value.
"""

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from common.constants import EULER_STEPS

LLMTransport = Literal["triton", "openai"]
LLMBackend = Literal["python", "tensorrtllm"]
ChunkStrategy = Literal["exponential", "equal", "time_based"]  # see common/orchestrator/chunking.py
LLMEngine = Literal["auto", "tensorrt_llm", "vllm", "onnxruntime_genai"]  # see common/llm/engines/loading.py
FlowRuntime = Literal["auto", "torch", "cuda_graph", "onnxruntime", "tensorrt"]  # see common/accel/loading.py

ConfigT = TypeVar("ConfigT", bound="ModelConfig")

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_PLACEHOLDER = re.compile(r"\$\{\w*\}?")


def parse_setting(key: str, value: str, kind: Any) -> Any:
    """`value` as `kind`: str, int, float, bool, Literal of strings, or tuple[str, ...] (commas or spaces between).

    A placeholder that was never filled, or a value of another kind, is a ValueError naming key and value.
    """
    if _PLACEHOLDER.search(value):
        raise ValueError(f"parameter {key!r} was never filled in: {value!r}")
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"parameter {key!r} must be one of {', '.join(get_args(kind))}, not {value!r}")
        return value
    if get_origin(kind) is tuple:
        return tuple(part for part in re.split(r"[,\s]+", value) if part)
    try:
        return _BOOLEANS[value.strip().lower()] if kind is bool else kind(value)
    except (KeyError, ValueError):
        raise ValueError(f"parameter {key!r} must be a {kind.__name__}, not {value!r}") from None


def format_setting(value: object) -> str:
    """The text of a parameter: what `parse_setting` reads back as `value`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(str(part) for part in value)
    return str(value)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Base of the models' settings; a field is read from the parameter of its name.

    Two names are not parameters: `device` follows the instance's kind and `decoupled` the transaction policy.
    """

    # Template parameters that another backend reads and that mean nothing to the python model.
    foreign_parameters: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def parameters(cls) -> dict[str, dataclasses.Field[Any]]:
        """The fields that come from config.pbtxt's parameters, by the parameter's key."""
        fields = (f for f in dataclasses.fields(cls) if f.name not in ("device", "decoupled"))
        return {f.metadata.get("key", f.name): f for f in fields}

    @classmethod
    def from_triton(cls: type[ConfigT], args: dict[str, str]) -> ConfigT:
        """Settings from Triton's `args`: `model_config` (JSON), `model_instance_kind`, `model_instance_device_id`."""
        model_config = json.loads(args["model_config"])
        given = {key: entry.get("string_value", "") for key, entry in model_config.get("parameters", {}).items()}
        known = cls.parameters()
        if unknown := sorted(given.keys() - known.keys() - cls.foreign_parameters):
            key = unknown[0]
            raise ValueError(f"unknown parameter {key!r} (value {given[key]!r}); known are {', '.join(sorted(known))}")
        hints = get_type_hints(cls)
        values = {f.name: parse_setting(key, given[key], hints[f.name]) for key, f in known.items() if key in given}
        for key, field in known.items():
            if field.default is dataclasses.MISSING and not values.get(field.name):
                raise ValueError(f"parameter {key!r} is missing or empty")
        if "device" in hints:
            values["device"] = _device(args)
        if "decoupled" in hints:
            values["decoupled"] = bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))
        return cls(**values)

    def require_positive(self, *names: str) -> None:
        """Every named number must be above zero."""
        for name in names:
            if not getattr(self, name) > 0:
                raise ValueError(f"parameter {name!r} must be above 0, not {getattr(self, name)!r}")


def _device(args: dict[str, str]) -> str:
    """The torch device of this instance: "cpu" or "cuda:N"."""
    if args.get("model_instance_kind") == "GPU":
        return f"cuda:{int(args['model_instance_device_id'])}"
    return "cpu"


@dataclass(frozen=True, kw_only=True)
class AudioTokenizerConfig(ModelConfig):
    """`model_dir` holds speech_tokenizer_v2*.onnx. An empty `llm_tokenizer_dir` means
    OFFICIAL_FIRST_SPEECH_ID."""

    model_dir: str
    llm_tokenizer_dir: str = ""
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class SpeakerEmbeddingConfig(ModelConfig):
    """`model_dir` holds campplus.onnx. `runtime`: what computes it, see docs/accelerators.md."""

    model_dir: str
    runtime: Literal["onnxruntime", "tensorrt"] = "onnxruntime"
    device: str = "cpu"


# What the C++ `tensorrtllm` backend reads from the config.pbtxt that both backends share.
_TENSORRTLLM_PARAMETERS = frozenset(
    (
        "FORCE_CPU_ONLY_INPUT_TENSORS",
        "gpt_model_type",
        "max_beam_width",
        "max_tokens_in_paged_kv_cache",
        "max_attention_window_size",
        "exclude_input_in_output",
        "batch_scheduler_policy",
        "cancellation_check_period_ms",
        "enable_kv_cache_reuse",
    )
)


@dataclass(frozen=True, kw_only=True)
class TensorrtLLMConfig(ModelConfig):
    """The LLM as a Triton model, python backend.

    `engine_dir`: what the engine loads. `engine`: "auto" is the best one that can be imported and reads `engine_dir`,
    see common/llm/engines/loading.py. `tokenizer_dir`: HuggingFace directory; empty if the engine's own holds it.
    `max_requests`: generated at the same time; one more is refused as unavailable. As many as a vocoder has streams.
    Each has a row of key/value cache, of which only the tokens written so far take memory: 24 kB a token for the
    official LLM (24 layers x 2 heads x 64 x key and value x 4 bytes), so 37 MB for 30 s of recording and 30 s of
    speech, 2.4 GB for 64 of them. `gpu_share`: of the GPU's memory that an engine there takes, of what is free for keys
    and values (tensorrt_llm) or of all for everything (vllm); the vocoder needs the rest.
    """

    foreign_parameters: ClassVar[frozenset[str]] = _TENSORRTLLM_PARAMETERS

    # Named as the C++ backend names it, so that one template serves both.
    engine_dir: str = dataclasses.field(metadata={"key": "gpt_model_path"})
    tokenizer_dir: str = ""
    engine: LLMEngine = "auto"
    max_requests: int = 64
    gpu_share: float = dataclasses.field(default=0.5, metadata={"key": "kv_cache_free_gpu_mem_fraction"})
    device: str = "cpu"
    decoupled: bool = False

    def __post_init__(self) -> None:
        self.require_positive("max_requests")
        if not 0 < self.gpu_share < 1:
            raise ValueError(
                f"parameter 'kv_cache_free_gpu_mem_fraction' must be between 0 and 1, not {self.gpu_share!r}"
            )


@dataclass(frozen=True, kw_only=True)
class HopConfig(ModelConfig):
    """Chunks of a stream, in speech tokens: the orchestrator cuts by them, token2wav makes CUDA graphs for them."""

    first_hop_tokens: int = 15
    max_hop_tokens: int = 100

    def __post_init__(self) -> None:
        self.require_positive("first_hop_tokens", "max_hop_tokens")


@dataclass(frozen=True, kw_only=True)
class Token2WavConfig(HopConfig):
    """Both vocoders. `model_dir` holds flow.pt and hift.pt; an empty `llm_tokenizer_dir` means
    OFFICIAL_FIRST_SPEECH_ID.

    `n_timesteps`: Euler steps. `max_streams`: live streams per instance. `idle_seconds`: a stream that is silent for
    longer is freed. `voice_cache_mb`: prompt caches of voices, MiB (only the DiT flow has them; on a GPU 33 per second
    of prompt): those that are spoken in, which it limits, and as many others as there is room for. `batch_memory_mb`:
    for the temporary tensors of one batch on a GPU, MiB; it bounds how many frames a batch and a CUDA graph hold, see
    common/token2wav/limits.py.
    `flow_runtime`: what computes the flow's estimator, see docs/accelerators.md; "auto" needs no files beside
    the checkpoint. `flow_precision`, `vocoder_precision`: what the networks compute in; "auto" is float16
    on a GPU, float32 on a CPU, but bfloat16 for a flow in torch on a CPU that has it.
    """

    model_dir: str
    llm_tokenizer_dir: str = ""
    n_timesteps: int = EULER_STEPS
    max_streams: int = 64
    idle_seconds: float = 60.0
    voice_cache_mb: int = 4096
    batch_memory_mb: int = 4352
    flow_runtime: FlowRuntime = "auto"
    flow_precision: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    vocoder_precision: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: str = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("n_timesteps", "max_streams", "idle_seconds", "voice_cache_mb", "batch_memory_mb")


@dataclass(frozen=True, kw_only=True)
class OrchestratorConfig(HopConfig):
    """Both orchestrators.

    `llm_transport`: "triton" asks the model `llm_model` of the same server, which `llm_backend` serves; "openai" the
    servers at `llm_urls` (base URLs) in their `llm_dialect`, see common/llm/openai_dialects.py. Sampling values are the
    defaults of a request's own parameters. The token ratios are the fewest and most speech tokens per token of the
    text. Hops count speech tokens. Timeouts in seconds: to the LLM's first tokens, between later ones, and of any other
    model's answer. The first two stay below 5 s, because a dead LLM has to be an error within that time. `voices_dir`
    holds registered voices (see `voices`); `default_speaker` is the one of requests that name none.
    """

    model_dir: str
    llm_tokenizer_dir: str = ""
    llm_transport: LLMTransport = "triton"
    llm_urls: tuple[str, ...] = ()
    llm_model: str = "tensorrt_llm"
    llm_backend: LLMBackend = "python"
    llm_dialect: Literal["auto", "vllm", "trtllm", "text", "transformers", "chat"] = "auto"
    dynamic_chunk_strategy: ChunkStrategy = "exponential"
    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 50
    repetition_penalty: float = 1.1
    max_tokens: int = 750
    ras_window: int = 0
    ras_tau: float = 0.1
    min_token_ratio: float = 2.0
    max_token_ratio: float = 20.0
    first_token_timeout: float = 4.5
    token_timeout: float = 4.5
    model_timeout: float = 15.0
    max_text_chars: int = 4096
    voices_dir: str = ""
    default_speaker: str = ""
    decoupled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive(
            "top_p",
            "top_k",
            "repetition_penalty",
            "max_tokens",
            "first_token_timeout",
            "token_timeout",
            "model_timeout",
            "max_text_chars",
        )
        if self.temperature < 0:
            raise ValueError(f"parameter 'temperature' must not be negative, not {self.temperature!r}")
        if self.llm_transport == "openai" and not self.llm_urls:
            raise ValueError("parameter 'llm_urls' is empty, but llm_transport is 'openai'")
