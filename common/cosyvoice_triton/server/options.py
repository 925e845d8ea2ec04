"""Everything that a stack's models are configured by, for a rendering or for a `Speaker`."""

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cosyvoice_triton import stacks
from cosyvoice_triton.config import (
    SPARE_REQUESTS,
    ConfigT,
    InstanceKind,
    LLMBackend,
    LLMEngine,
    LLMTransport,
    ModelConfig,
    OrchestratorConfig,
    TensorrtLLMConfig,
    Token2WavConfig,
    check_gpus,
    format_setting,
    has_gpu,
    parse_setting,
)
from cosyvoice_triton.demo_checkpoint import STACKS as DEMO_STACKS
from cosyvoice_triton.server import gpus

Device = Literal["auto", "cpu", "gpu"]

# With these, streams take less of token2wav's GPU than in the plans; so do those of networks that are not full-size.
_OTHER_MEMORY = ("llm_memory_gib", "llm_gpu", "token2wav_gpus", "n_timesteps", "kv_cache_dtype")
_FULL_SIZE = 100 << 20  # bytes: less than any official flow.pt, and more than the demo's


@dataclass(frozen=True, kw_only=True)
class StackOptions:
    """Everything that a rendering depends on.

    models_dir: the directory with all checkpoints; `stacks` names the folders in it: the stack's checkpoint, its LLM,
        and what the LLM's engine loads if that is another folder. voices/ contains the registered voices.
    stack: its name. decoupled: streamed responses. device: for the prompt models, unless the setting `prompt_device`
        says otherwise, and token2wav.
    llm_urls, llm_model: for `llm_transport` "openai". llm_backend, llm_engine (of the python backend), llm_engine_dir:
        for the model `tensorrt_llm`. settings: further template keys, for every model that has them.
    """

    models_dir: Path
    stack: str = stacks.DEFAULT.name
    decoupled: bool = True
    device: Device = "auto"
    llm_transport: LLMTransport = OrchestratorConfig.llm_transport
    llm_urls: tuple[str, ...] = OrchestratorConfig.llm_urls
    llm_model: str = OrchestratorConfig.llm_model
    llm_backend: LLMBackend = OrchestratorConfig.llm_backend
    llm_engine: LLMEngine = TensorrtLLMConfig.engine
    llm_engine_dir: Path | None = None
    max_batch_size: int = 16
    settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stacks.named(self.stack)
        if self.max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, not {self.max_batch_size}")
        if self.llm_transport == "openai" and not self.llm_urls:
            raise ValueError("llm_transport 'openai' needs llm_urls")
        check_gpus(self.token2wav_gpus)

    @property
    def token2wav_gpus(self) -> tuple[int, ...]:
        """Return the GPUs with a token2wav model each."""
        given = self.settings.get("token2wav_gpus", format_setting(Token2WavConfig.token2wav_gpus))
        return parse_setting("token2wav_gpus", given, tuple[int, ...])

    @property
    def orchestrator(self) -> str:
        """Return the model that clients call."""
        return stacks.named(self.stack).orchestrator

    @property
    def checkpoint_dir(self) -> Path:
        """Return the folder with the flow, the vocoder and the prompt models."""
        return self.models_dir.resolve() / stacks.named(self.stack).checkpoint

    @property
    def tokenizer_dir(self) -> Path:
        return self.models_dir.resolve() / stacks.named(self.stack).llm.directory

    @property
    def voices_dir(self) -> Path:
        return self.models_dir.resolve() / "voices"

    @property
    def instance_kind(self) -> InstanceKind:
        kinds: dict[Device, InstanceKind] = {"auto": "KIND_AUTO", "cpu": "KIND_CPU", "gpu": "KIND_GPU"}
        return kinds[self.device]

    @property
    def engine_dir(self) -> Path:
        if self.llm_engine_dir is not None:
            return self.llm_engine_dir.resolve()
        if self.llm_backend == "tensorrtllm":
            return self.models_dir.resolve() / stacks.named(self.stack).llm.engine
        if self.llm_engine in ("tensorrt_llm", "vllm", "cuda") or (
            self.llm_engine == "auto" and reads_huggingface(self.instance_kind)
        ):
            return self.tokenizer_dir
        return self.models_dir.resolve() / stacks.named(self.stack).llm.genai

    def missing_files(self) -> list[Path]:
        """Return the files that the stack would load and that do not exist."""
        needed = [self.checkpoint_dir / name for name in stacks.named(self.stack).files]
        needed.append(self.tokenizer_dir / "tokenizer_config.json")
        if self.llm_transport == "triton":
            needed.append(self.engine_dir)
        return [path for path in needed if not path.exists()]

    def require_files(self) -> None:
        """Raise ValueError naming the first missing file and the command that makes it."""
        if missing := self.missing_files():
            raise ValueError(f"{missing[0]} is missing; {self.remedy(missing[0])}")

    def remedy(self, missing: Path) -> str:
        """Return the command that makes a missing part of the checkpoint."""
        prepare, models = "cosyvoice-triton prepare", self.models_dir
        if missing == self.engine_dir and self.llm_backend == "tensorrtllm":
            return f"run: {prepare} engine {models} --stack {self.stack} (in NVIDIA's image, see docs/llm.md)"
        if missing == self.engine_dir and self.tokenizer_dir.exists():
            instead = "leave --llm-engine-dir out and " if self.llm_engine_dir else ""
            return f"{instead}run: {prepare} engine {models} --stack {self.stack} --kind onnxruntime_genai"
        if stacks.named(self.stack) in DEMO_STACKS:
            other = f"for the demo checkpoint: {prepare} demo {models} --stack {self.stack}"
        else:
            other = f"for random weights, in a clone: python -m tests.random_weights {models}-random"
        return f"for the official files run: {prepare} download {models} --stack {self.stack}; {other}"

    def config(self, kind: type[ConfigT]) -> ConfigT:
        """Return the settings of a model of the stack, as it reads them from its rendering. ValueError for a setting
        that no model has, or of a wrong value."""
        models: tuple[type[ModelConfig], ...] = (OrchestratorConfig, Token2WavConfig, TensorrtLLMConfig)
        known = set().union(*(model.parameters() for model in models))
        if unknown := sorted(self.settings.keys() - known):
            raise ValueError(f"unknown setting {unknown[0]!r}; there are {', '.join(sorted(known))}")
        engine = {"gpt_model_path": str(self.engine_dir)}
        values = {**stacks.named(self.stack).settings, **self.values(), **engine, **self.settings}
        return kind.of({key: value for key, value in values.items() if key in kind.parameters()})

    def values(self) -> dict[str, str]:
        """Return the values of all template keys that follow from the options; a template uses those it has."""
        streams = self.settings.get("max_streams", format_setting(Token2WavConfig.max_streams))
        models = len(self.token2wav_gpus)
        # What ends the server if it fails is together, so that each other GPU only has listeners of its own to lose.
        chosen = not self.settings.keys().isdisjoint(("token2wav_gpus", "llm_gpu"))
        return {
            "max_requests": format_setting(models * parse_setting("max_streams", streams, int) + SPARE_REQUESTS),
            "instance_gpus": self.settings.get("llm_gpu", "0") if chosen and self.device != "cpu" else "",
            "model_dir": str(self.checkpoint_dir),
            "llm_tokenizer_dir": str(self.tokenizer_dir),
            "tokenizer_dir": str(self.tokenizer_dir),
            "engine_dir": str(self.engine_dir),
            "decoupled_mode": format_setting(self.decoupled),
            "instance_kind": self.instance_kind,
            "engine": self.llm_engine,
            "llm_transport": self.llm_transport,
            "llm_backend": self.llm_backend,
            "llm_urls": format_setting(self.llm_urls),
            "llm_model": self.llm_model,
            "voices_dir": str(self.voices_dir),
            "bls_instance_num": "1",
            "triton_max_batch_size": str(self.max_batch_size),
            "max_queue_delay_microseconds": "0",
            # For the C++ backend. Its key/value pool gets a fraction of the memory instead of a number of tokens, which
            # would limit the streams.
            "triton_backend": self.llm_backend,
            "batching_strategy": "inflight_fused_batching",
            "max_beam_width": "1",
            "max_tokens_in_paged_kv_cache": "",
            "max_attention_window_size": "",
            "kv_cache_free_gpu_mem_fraction": format_setting(TensorrtLLMConfig.gpu_share),
            "exclude_input_in_output": "True",
            "enable_kv_cache_reuse": "False",
            "encoder_input_features_data_type": "TYPE_FP16",
            "logits_datatype": "TYPE_FP32",
        }


def parse_settings(pairs: Sequence[str]) -> dict[str, str]:
    """Return `key=value` items as a dict. Raise ValueError naming one that is not a pair."""
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"--set {pair!r} is not KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def planned(options: StackOptions) -> tuple[StackOptions, str]:
    """Return the options with the settings of the plan for the GPU that is there, and the line that says so; as they
    are, and "", where they set `max_streams` or no GPU will be used. GpuError if the GPU or its memory is too small, or
    its driver too old.

    A machine without a GPU may render for one that has one.
    """
    if options.device == "cpu":
        return options, ""
    seen = gpus.used(options.device) if gpus.visible() else []
    of_token2wav = [seen[number] for number in options.token2wav_gpus if number < len(seen)]
    gib = parse_setting("gpu_memory_gib", options.settings.get("gpu_memory_gib", ""), float | None)
    if "max_streams" in options.settings:
        if of_token2wav and _as_planned(options):
            streams = parse_setting("max_streams", options.settings["max_streams"], int)
            gpus.require_room(
                options.stack, of_token2wav, streams, gib, prompts=options.settings.get("prompt_device") != "cpu"
            )
        return options, ""
    made = gpus.plan(options.stack, of_token2wav, gib) if of_token2wav else None
    if made is None:
        return options, ""
    settings = {"max_streams": str(made.streams[options.stack].listeners), "prompt_device": made.prompt_device}
    line = gpus.describe(made, options.stack, of_token2wav)
    return dataclasses.replace(options, settings=settings | dict(options.settings)), line


def _as_planned(options: StackOptions) -> bool:
    """Return whether a stream takes as much of token2wav's GPU as in the plans; what is not there yet is official."""
    flow = options.checkpoint_dir / stacks.named(options.stack).flow
    official = not flow.exists() or flow.stat().st_size > _FULL_SIZE and not flow.with_suffix(".json").exists()
    return official and options.llm_transport == "triton" and options.settings.keys().isdisjoint(_OTHER_MEMORY)


def reads_huggingface(instance_kind: InstanceKind) -> bool:
    """Return whether "auto" finds an engine that reads a HuggingFace directory without conversion. Imports none."""
    if instance_kind == "KIND_CPU":
        return False
    if any(map(_is_installed, ("tensorrt_llm", "vllm"))):
        return True
    # The engine cuda: its kernels are written in Triton's language, which comes with CUDA builds of torch.
    return importlib.util.find_spec("triton") is not None and (instance_kind == "KIND_GPU" or has_gpu())


def _is_installed(library: str) -> bool:
    """Return whether a library can be imported; a folder of its name in the current directory is none."""
    spec = importlib.util.find_spec(library)
    return spec is not None and spec.origin is not None
