"""The settings of each model, parsed once from the arguments that Triton passes to `initialize`.

Every default is defined here and nowhere else: the templates, the rendering options and the policy objects of the LLM
and the orchestrator take theirs from these dataclasses. A key that is unknown, unfilled (`${key}`) or cannot be parsed
is a ValueError with the key and its value.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from cosyvoice_triton.profiles import ProfileName
from cosyvoice_triton.replicas import replica_number

LLMTransport = Literal["triton", "openai"]
LLMBackend = Literal["python", "tensorrtllm"]
ChunkStrategy = Literal["exponential", "equal", "time_based"]  # see orchestrator/chunking.py
LLMEngine = Literal["auto", "tensorrt_llm", "vllm", "cuda", "onnxruntime_genai"]  # see llm/engines/loading.py
SpeakerRuntime = Literal["onnxruntime", "tensorrt"]
FlowRuntime = Literal["auto", "torch", "cuda_graph", "onnxruntime", "tensorrt"]  # see runtimes/loading.py
PlanPrecision = Literal["float32", "float16"]  # of TensorRT plans
InstanceKind = Literal["KIND_AUTO", "KIND_CPU", "KIND_GPU"]
KvCacheDtype = Literal["auto", "int8"]  # vLLM's name for the format of kept keys and values
PromptDevice = Literal["auto", "cpu"]  # auto: that of the other models
SamplingName = Literal["cosyvoice2", "triton"]


class SamplingPreset(NamedTuple):
    """Values of sampling parameters that belong together, see `Sampling` in llm/interface.py."""

    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    ras_window: int
    ras_tau: float = 0.1


# cosyvoice2: `sampling` of upstream's cosyvoice2.yaml. triton: upstream's Triton runtime, whose backend has no
# repetition-aware sampling.
SAMPLING_PRESETS: dict[SamplingName, SamplingPreset] = {
    "cosyvoice2": SamplingPreset(1.0, 0.8, 25, repetition_penalty=1.0, ras_window=10),
    "triton": SamplingPreset(0.8, 0.95, 50, repetition_penalty=1.1, ras_window=0),
}

ConfigT = TypeVar("ConfigT", bound="ModelConfig")


# Requests to the LLM beside one for each stream: of streams that have just ended, of which it may hear a little later.
SPARE_REQUESTS = 8


def planned_llm_gib(requests: int) -> float:
    """Return the GiB of a GPU for the LLM, where `llm_memory_gib` is not set.

    They are for CUDA's context, weights in bfloat16 and graphs, and for each request 19 MB of keys and values: 12 kB a
    token, 30 s of recording and 30 s of speech.
    """
    return 2.3 + 0.02 * requests


BOOLEANS = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_PLACEHOLDER = re.compile(r"\$\{\w*\}?")


def parse_setting(key: str, value: str, kind: Any) -> Any:
    """Return `value` as `kind`: str, int, float, bool, Literal of strings, or a tuple of one of these.

    The entries of a tuple are separated by commas or spaces. A kind may be optional: then empty text is None.
    ValueError with key and value if it is an unfilled placeholder or not of that kind.
    """
    if _PLACEHOLDER.search(value):
        raise ValueError(f"parameter {key!r} was never filled in: {value!r}")
    if get_origin(kind) is UnionType:
        if not value:
            return None
        (kind,) = (member for member in get_args(kind) if member is not NoneType)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"parameter {key!r} must be one of {', '.join(get_args(kind))}, not {value!r}")
        return value
    if get_origin(kind) is tuple:
        of_each = get_args(kind)[0]
        return tuple(parse_setting(key, part, of_each) for part in re.split(r"[,\s]+", value) if part)
    try:
        return BOOLEANS[value.strip().lower()] if kind is bool else kind(value)
    except (KeyError, ValueError):
        raise ValueError(f"parameter {key!r} must be {_KINDS[kind]}, not {value!r}") from None


def format_setting(value: object) -> str:
    """Return the parameter text that `parse_setting` reads back as `value`."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(str(part) for part in value)
    return str(value)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Base of the models' settings; each field is read from the parameter of the same name.

    Three fields are not parameters: `device` follows from the instance kind, `decoupled` from the transaction policy,
    `instances` from the instance groups.
    """

    # Parameters that only another backend reads.
    foreign_parameters: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def parameters(cls) -> dict[str, dataclasses.Field[Any]]:
        """Return the fields that are read from config.pbtxt's parameters, by parameter key."""
        fields = (f for f in dataclasses.fields(cls) if f.name not in ("device", "decoupled", "instances"))
        return {f.metadata.get("key", f.name): f for f in fields}

    @classmethod
    def from_triton(cls: type[ConfigT], args: dict[str, str]) -> ConfigT:
        """Return settings from Triton's `args`: `model_config` (JSON), `model_instance_kind`,
        `model_instance_device_id`."""
        model_config = json.loads(args["model_config"])
        given = {key: entry.get("string_value", "") for key, entry in model_config.get("parameters", {}).items()}
        hints, values = get_type_hints(cls), cls.parsed(given)
        if "device" in hints:
            kind = values.get("instance_kind")
            number = replica_number(model_config.get("name", ""))
            values["device"] = _device(args) if kind is None else device_of(kind, cls._gpu(values, number))
        if "decoupled" in hints:
            values["decoupled"] = bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))
        if "instances" in hints:
            values["instances"] = sum(group.get("count", 1) for group in model_config.get("instance_group", [])) or 1
        return cls(**values)

    @classmethod
    def of(cls: type[ConfigT], given: Mapping[str, str]) -> ConfigT:
        """Return settings from parameters of config.pbtxt alone: those of a model that runs in this process."""
        values = cls.parsed(given)
        if "device" in get_type_hints(cls) and "instance_kind" in values:
            values["device"] = device_of(values["instance_kind"], cls._gpu(values, 0))
        return cls(**values)

    @classmethod
    def parsed(cls, given: Mapping[str, str]) -> dict[str, Any]:
        """Return the fields that these parameters of config.pbtxt give. ValueError naming one that is unknown, missing
        or not of its kind."""
        known, hints = cls.parameters(), get_type_hints(cls)
        if unknown := sorted(given.keys() - known.keys() - cls.foreign_parameters):
            key = unknown[0]
            raise ValueError(f"unknown parameter {key!r} (value {given[key]!r}); known are {', '.join(sorted(known))}")
        values = {f.name: parse_setting(key, given[key], hints[f.name]) for key, f in known.items() if key in given}
        for key, field in known.items():
            if field.default is dataclasses.MISSING and not values.get(field.name):
                raise ValueError(f"parameter {key!r} is missing or empty")
        return values

    @classmethod
    def _gpu(cls, values: Mapping[str, Any], number: int) -> int:
        """Return the GPU of replica `number` of a model that computes where its `instance_kind` says."""
        return 0

    def require_positive(self, *names: str) -> None:
        """Raise ValueError unless all these fields are above 0, or None."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"parameter {name!r} must be above 0, not {value!r}")


def _device(args: dict[str, str]) -> str:
    """Return the torch device that Triton gives this instance: "cpu" or "cuda:N"."""
    if args.get("model_instance_kind") == "GPU":
        return f"cuda:{int(args['model_instance_device_id'])}"
    return "cpu"


def device_of(kind: InstanceKind, gpu: int = 0) -> str:
    """Return the torch device of a model that computes on that GPU or on the CPU. ValueError if there is no such
    GPU."""
    if kind == "KIND_CPU" or (kind == "KIND_AUTO" and not has_gpu()):
        return "cpu"
    if gpu and gpu >= (count := gpu_count()):
        raise ValueError(f"there is no GPU {gpu}: this server sees {count}, numbered from 0")
    return f"cuda:{gpu}"


def has_gpu() -> bool:
    import torch  # here: the programs that only render configurations do without it

    return torch.cuda.is_available()


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def check_gpus(gpus: Sequence[int]) -> None:
    """Raise ValueError unless these are numbers of GPUs of which each is there once."""
    if not gpus or min(gpus) < 0 or len(set(gpus)) < len(gpus):
        given = format_setting(tuple(gpus))
        raise ValueError(f"parameter 'token2wav_gpus' must be numbers of GPUs, each once, not {given!r}")


@dataclass(frozen=True, kw_only=True)
class AudioTokenizerConfig(ModelConfig):
    """`model_dir` contains speech_tokenizer_v2*.onnx, or _v3*. Empty `llm_tokenizer_dir`: OFFICIAL_FIRST_SPEECH_ID."""

    model_dir: str
    llm_tokenizer_dir: str = ""
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class SpeakerEmbeddingConfig(ModelConfig):
    """`model_dir` contains campplus.onnx. `runtime`: what runs it, see docs/gpu.md."""

    model_dir: str
    runtime: SpeakerRuntime = "onnxruntime"
    device: str = "cpu"


# Parameters of the C++ `tensorrtllm` backend, which shares its config.pbtxt with the python backend.
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
        "guided_decoding_backend",
        "xgrammar_tokenizer_info_path",
    )
)


@dataclass(frozen=True, kw_only=True)
class TensorrtLLMConfig(ModelConfig):
    """The LLM as a Triton model on the python backend.

    engine_dir: what the engine loads. engine: "auto" is the best one that can be imported and can load `engine_dir`,
        see llm/engines/loading.py. tokenizer_dir: HuggingFace directory; empty if it is `engine_dir`.
    max_requests: requests generated at once; further ones are refused as unavailable. Rendering sets the number of
        token2wav's streams and SPARE_REQUESTS. Each has a row of key/value cache, which takes memory only for the
        tokens so far: 24 kB per token for the official LLM (24 layers x 2 heads x 64 x key and value x 4 bytes), so 37
        MB for 30 s of recording and 30 s of speech, and 2.4 GB for 64 requests.
    instance_kind: where the engine cuda computes; KIND_AUTO: on a GPU if there is one. llm_gpu: on which.
    llm_memory_gib: GiB of the GPU for vllm and cuda; None: `planned_llm_gib` of max_requests, see `memory_gib`.
    gpu_share: fraction of the free GPU memory for keys and values (tensorrt_llm).
    profile: the numbers that the engine cuda schedules by, see profiles.py.
    """

    foreign_parameters: ClassVar[frozenset[str]] = _TENSORRTLLM_PARAMETERS

    # The C++ backend's key, so that one template serves both.
    engine_dir: str = dataclasses.field(metadata={"key": "gpt_model_path"})
    tokenizer_dir: str = ""
    engine: LLMEngine = "auto"
    instance_kind: InstanceKind = "KIND_AUTO"
    llm_gpu: int = 0
    max_requests: int = 64 + SPARE_REQUESTS
    llm_memory_gib: float | None = None
    gpu_share: float = dataclasses.field(default=0.5, metadata={"key": "kv_cache_free_gpu_mem_fraction"})
    profile: ProfileName = "auto"
    decoupled: bool = False

    def __post_init__(self) -> None:
        self.require_positive("max_requests")
        if self.llm_gpu < 0:
            raise ValueError(f"parameter 'llm_gpu' must not be negative, not {self.llm_gpu}")
        if not 0 < self.gpu_share < 1:
            raise ValueError(
                f"parameter 'kv_cache_free_gpu_mem_fraction' must be between 0 and 1, not {self.gpu_share!r}"
            )

    @property
    def memory_gib(self) -> float:
        """Return the GiB of the GPU for the LLM."""
        return planned_llm_gib(self.max_requests) if self.llm_memory_gib is None else self.llm_memory_gib


@dataclass(frozen=True, kw_only=True)
class HopConfig(ModelConfig):
    """Settings that the orchestrator and token2wav share.

    first_hop_tokens, max_hop_tokens: chunk lengths in speech tokens, by which the orchestrator schedules and token2wav
        sizes its CUDA graphs. profile: which numbers both schedule by, see profiles.py.
    """

    first_hop_tokens: int = 15
    max_hop_tokens: int = 100
    profile: ProfileName = "auto"

    def __post_init__(self) -> None:
        self.require_positive("first_hop_tokens", "max_hop_tokens")


@dataclass(frozen=True, kw_only=True)
class Token2WavConfig(HopConfig):
    """token2wav of every stack. Empty `llm_tokenizer_dir`: OFFICIAL_FIRST_SPEECH_ID.

    instance_kind: where the model computes, on the CPU or on a GPU; KIND_AUTO: on a GPU if there is one. It has one
        instance, which has all its streams.
    token2wav_gpus: the GPUs of the server's token2wav models, one model for each: this one computes on that of its
        number, see replicas.py. llm_gpu: the GPU of the LLM.
    model_dir: contains flow.pt and hift.pt. n_timesteps: Euler steps; None: the checkpoint's. max_streams: live ones.
    idle_seconds: a stream without requests for this long is freed.
    gpu_memory_gib: GiB of the GPU that all models of the server may take together; None: what is free. What remains
        beside the others and `max_streams` streams is for prompt caches, see token2wav/gpu/memory.py.
    llm_memory_gib: of the memory of `llm_gpu`, the LLM's; None: `planned_llm_gib`.
    prompt_device: where `audio_tokenizer` and `speaker_embedding` compute.
    flow_runtime: what runs the flow's estimator, see docs/gpu.md; "auto" needs only the checkpoint's files.
    kv_cache_dtype: of the keys and values that a flow keeps (dit, cosyvoice3). "auto": the flow's own format; "int8":
        about half of the memory, see docs/gpu.md.
    flow_precision, vocoder_precision: precision of the networks. "auto": float16 on a GPU, float32 on a CPU, except
        bfloat16 for a flow in torch on a CPU that supports it; bfloat16 or float32 if the error is too large. See
        docs/gpu.md.
    """

    model_dir: str
    llm_tokenizer_dir: str = ""
    instance_kind: InstanceKind = "KIND_AUTO"
    token2wav_gpus: tuple[int, ...] = (0,)
    llm_gpu: int = 0
    n_timesteps: int | None = None
    max_streams: int = 64
    idle_seconds: float = 60.0
    gpu_memory_gib: float | None = None
    llm_memory_gib: float | None = None
    prompt_device: PromptDevice = "auto"
    flow_runtime: FlowRuntime = "auto"
    kv_cache_dtype: KvCacheDtype = "auto"
    flow_precision: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    vocoder_precision: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: str = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("n_timesteps", "max_streams", "idle_seconds", "gpu_memory_gib")
        check_gpus(self.token2wav_gpus)

    @property
    def llm_share_gib(self) -> float | None:
        """Return `llm_memory_gib` of this model's GPU; None stands for `planned_llm_gib` of this model's streams."""
        if self.device not in ("cpu", f"cuda:{self.llm_gpu}"):
            return 0.0
        if self.llm_memory_gib is None and len(self.token2wav_gpus) > 1:
            return planned_llm_gib(len(self.token2wav_gpus) * self.max_streams + SPARE_REQUESTS)
        return self.llm_memory_gib

    @classmethod
    def _gpu(cls, values: Mapping[str, Any], number: int) -> int:
        gpus = values.get("token2wav_gpus", cls.token2wav_gpus)
        if number >= len(gpus):
            raise ValueError(f"parameter 'token2wav_gpus' {format_setting(gpus)!r} has no GPU of number {number}")
        return gpus[number]


@dataclass(frozen=True, kw_only=True)
class OrchestratorConfig(HopConfig):
    """The orchestrator of every stack.

    token2wav_gpus: as in `Token2WavConfig`; there are as many token2wav models, and a listener is served by one.
    llm_transport: "triton" calls the model `llm_model` of the same server, which `llm_backend` runs; "openai" calls the
        servers at `llm_urls` (base URLs) in their `llm_dialect`, see llm/openai_client.py.
    dynamic_chunk_strategy, first_hop_tokens, max_hop_tokens: see orchestrator/chunking.py.
    short_first_hop_tokens: of first hops where the server has slack, see orchestrator/chunking.py.
    sampling, max_tokens, trim_silence, retry_bad_answers: defaults of the request parameters of the same names.
    min_token_ratio, max_token_ratio: fewest and most speech tokens per text token.
    token_timeout, model_timeout: seconds to the LLM's first tokens and between later ones, and for the answer of any
        other model. The first one is below 5 s, so that a dead LLM is an error within that time.
    text_timeout: seconds that the LLM waits for the next piece of a text in pieces.
    skip_thoughts: leave out what a text has between `<think>` and `</think>`.
    voices_dir: registered voices, see voice/book.py. default_speaker: the voice of requests without one.
    """

    model_dir: str
    llm_tokenizer_dir: str = ""
    llm_transport: LLMTransport = "triton"
    llm_urls: tuple[str, ...] = ()
    llm_model: str = "tensorrt_llm"
    llm_backend: LLMBackend = "python"
    llm_dialect: Literal["auto", "vllm", "trtllm", "text", "transformers", "chat"] = "auto"
    dynamic_chunk_strategy: ChunkStrategy = "exponential"
    short_first_hop_tokens: int = 10
    sampling: SamplingName = "cosyvoice2"
    max_tokens: int = 750
    trim_silence: bool = True
    retry_bad_answers: bool = True
    min_token_ratio: float = 2.0
    max_token_ratio: float = 20.0
    token_timeout: float = 4.5
    model_timeout: float = 15.0
    text_timeout: float = 20.0
    max_text_chars: int = 4096
    skip_thoughts: bool = False
    voices_dir: str = ""
    default_speaker: str = ""
    token2wav_gpus: tuple[int, ...] = Token2WavConfig.token2wav_gpus
    decoupled: bool = False
    instances: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive(
            "short_first_hop_tokens", "max_tokens", "token_timeout", "model_timeout", "text_timeout", "max_text_chars"
        )
        check_gpus(self.token2wav_gpus)
        if self.llm_transport == "openai" and not self.llm_urls:
            raise ValueError("parameter 'llm_urls' is empty, but llm_transport is 'openai'")
