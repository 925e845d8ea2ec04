"""Fill in templates of config.pbtxt, and render the models of a stack into a repository that Triton can serve.

A template is a config.pbtxt with `${key}` placeholders for what follows from the rendering's options or has to be
given. Every other setting in `config` can be given, too: the rendering then adds it to the model's parameters.
"""

import dataclasses
import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from cosyvoice_triton import stacks
from cosyvoice_triton.config import (
    SPARE_REQUESTS,
    AudioTokenizerConfig,
    InstanceKind,
    LLMBackend,
    LLMEngine,
    LLMTransport,
    ModelConfig,
    OrchestratorConfig,
    SpeakerEmbeddingConfig,
    TensorrtLLMConfig,
    Token2WavConfig,
    check_gpus,
    format_setting,
    parse_setting,
)
from cosyvoice_triton.llm.engines.loading import reads_huggingface
from cosyvoice_triton.replicas import first_replica, replicas
from cosyvoice_triton.server import gpus

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"  # links to the template folders of the checkout
Device = Literal["auto", "cpu", "gpu"]

MARKER = ".rendered.json"  # marks a directory as a rendering and records its options; Triton ignores files

# The models that all stacks have.
_SHARED: dict[str, type[ModelConfig]] = {
    "audio_tokenizer": AudioTokenizerConfig,
    "speaker_embedding": SpeakerEmbeddingConfig,
    "tensorrt_llm": TensorrtLLMConfig,
}

_PROMPT_MODELS = ("audio_tokenizer", "speaker_embedding")

# Keys that upstream's commands do not give and no model reads.
_TEMPLATE_DEFAULTS = {
    "instance_kind": "KIND_AUTO",  # the GPU if there is one
    "instance_gpus": "",  # every GPU
}

# Keys whose value is the same whatever is given: tokens are streamed even if the orchestrator sends one response.
FIXED: dict[str, dict[str, str]] = {"tensorrt_llm": {"decoupled_mode": "true"}}

# With these, streams take less of token2wav's GPU than in the plans; so do those of networks that are not full-size.
_OTHER_MEMORY = ("llm_memory_gib", "llm_gpu", "token2wav_gpus", "n_timesteps", "kv_cache_dtype")
_FULL_SIZE = 100 << 20  # bytes: less than any official flow.pt, and more than the demo's

_PLACEHOLDER = re.compile(r"\$\{(\w+)\}")
_PARAMETER = re.compile(r'key: *"(\w+)"')


def placeholders(template: str) -> list[str]:
    """Return the keys of a template, in order of appearance."""
    return list(dict.fromkeys(_PLACEHOLDER.findall(template)))


def model_name(template: str) -> str:
    """Return the model that a config.pbtxt belongs to."""
    if (match := re.search(r'^name: *"(\w+)"', template, re.MULTILINE)) is None:
        raise ValueError('not a template of a model: no line `name: "..."`')
    return match[1]


def settings_of(model: str) -> type[ModelConfig]:
    """Return the settings that a model reads. Raise ValueError listing the models there are, if it is none of them."""
    if model in _SHARED:
        return _SHARED[model]
    return OrchestratorConfig if model == stacks.of_model(model).orchestrator else Token2WavConfig


def settings_to_add(template: str) -> set[str]:
    """Return the settings of a model that its template does not declare; none for a model that no stack has."""
    name = model_name(template)
    if not _is_known(name):
        return set()
    return settings_of(name).parameters().keys() - set(_PARAMETER.findall(template))


def _is_known(model: str) -> bool:
    return model in _SHARED or any(model in stack.models for stack in stacks.registered())


def defaults(model: str) -> dict[str, str]:
    """Return the settings of a model that have defaults, with their values. About the LLM they are those of upstream's
    deployment of the stack; `StackOptions` has its own.

    For a model that no stack has these are only the keys that Triton reads.
    """
    if not _is_known(model):
        return dict(_TEMPLATE_DEFAULTS)
    fields = settings_of(model).parameters().values()
    own = {f.name: format_setting(f.default) for f in fields if f.default is not dataclasses.MISSING}
    return _TEMPLATE_DEFAULTS | own | {key: value for key, value in _of_stack(model).items() if key in own}


def _of_stack(model: str) -> dict[str, str]:
    """Return the defaults of the model's stack, which replace those in `config`."""
    if model in _SHARED or not _is_known(model):
        return {}
    stack = stacks.of_model(model)
    return {**stack.settings, **stack.upstream}


def fill(template: str, given: Mapping[str, str]) -> str:
    """Return the template with every placeholder replaced, and a line for each other setting that is given or has a
    default of the stack. Raise ValueError naming keys that are unknown or have no value."""
    wanted = placeholders(template)
    if not wanted:
        raise ValueError("nothing to fill in: the template has no ${key}, so it was filled before")
    more = settings_to_add(template)
    if unknown := [key for key in given if key not in {*wanted, *more}]:
        known = ", ".join(sorted({*wanted, *more}))
        raise ValueError(f"unknown key {', '.join(map(repr, unknown))}; this template has {known}")
    for key, value in given.items():
        if unsafe := set(value) & set('"\\\n'):
            raise ValueError(f"the value of {key!r} must not contain {sorted(unsafe)!r}: {value!r}")
    name = model_name(template)
    values = defaults(name) | dict(given) | FIXED.get(name, {})
    if missing := [key for key in wanted if key not in values]:
        raise ValueError(f"no value for {', '.join(map(repr, missing))}; give key:value for each")
    added = {key: value for key, value in (_of_stack(name) | dict(given)).items() if key in more}
    lines = [f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n' for key, value in added.items()]
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template) + "".join(lines)


def parse(config: str, name: str) -> Any:
    """Parse a filled template of model `name` as a ModelConfig protobuf. Raise ValueError if Triton could not."""
    try:
        message = text_format.Parse(config, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise ValueError(f"{name}: not a valid config.pbtxt: {error}") from error
    if message.name != name:
        raise ValueError(f"{name}: the template belongs to model {message.name!r}")
    return message


def parse_settings(pairs: Sequence[str]) -> dict[str, str]:
    """Return `key=value` items as a dict. Raise ValueError naming one that is not a pair."""
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"--set {pair!r} is not KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


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
    def models(self) -> dict[str, Path]:
        """Return the models of the stack, with the directories of their templates."""
        shared = [name for name in _SHARED if name != "tensorrt_llm" or self.llm_transport == "triton"]
        own = TEMPLATES / stacks.named(self.stack).templates  # an absolute path stays as it is
        folders = {name: own if (own / name).is_dir() else TEMPLATES / stacks.SHARED_TEMPLATES for name in shared}
        stack = stacks.named(self.stack)
        folders |= dict.fromkeys((*replicas(stack.token2wav, len(self.token2wav_gpus)), stack.orchestrator), own)
        return {name: folder / first_replica(name) for name, folder in folders.items()}

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
            gpus.require_room(options.stack, of_token2wav, streams, gib)
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


def render(options: StackOptions, destination: Path) -> None:
    """Write the stack's model repository to `destination`, atomically.

    Replaces an earlier rendering. ValueError for any other directory that is not empty.
    """
    if destination.exists() and any(destination.iterdir()) and not (destination / MARKER).exists():
        raise ValueError(f"{destination} is not empty and not an earlier rendering; choose another or remove it")
    configs = _filled_configs(options)
    destination.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        for name, source in options.models.items():
            shutil.copytree(source / "1", work / name / "1", ignore=shutil.ignore_patterns("__pycache__"))
            (work / name / "config.pbtxt").write_text(configs[name])
        (work / MARKER).write_text(json.dumps(dataclasses.asdict(options), default=str, indent=1) + "\n")
        work.chmod(0o755)
        if destination.exists():
            shutil.rmtree(destination)
        work.rename(destination)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _filled_configs(options: StackOptions) -> dict[str, str]:
    """Return the config.pbtxt of each model. ValueError for a setting that it could not load with."""
    templates = {name: (source / "config.pbtxt").read_text() for name, source in options.models.items()}
    keys = {name: {*placeholders(template), *settings_to_add(template)} for name, template in templates.items()}
    known = set().union(*keys.values())
    if unknown := sorted(options.settings.keys() - known):
        raise ValueError(f"unknown setting {unknown[0]!r}; the models of this stack have {', '.join(sorted(known))}")
    configs = {}
    for name, template in templates.items():
        derived = {key: value for key, value in options.values().items() if key in placeholders(template)}
        values = derived | dict(options.settings)
        if name in _PROMPT_MODELS and values.get("prompt_device") == "cpu":
            values |= {"instance_kind": "KIND_CPU", "instance_gpus": ""}
        filled = fill(template, {key: value for key, value in values.items() if key in keys[name]})
        configs[name] = re.sub(r'^name: *"\w+"', f'name: "{name}"', filled, count=1, flags=re.MULTILINE)
        given = {key: value.string_value for key, value in parse(configs[name], name).parameters.items()}
        model = settings_of(name)
        model(**model.parsed(given))  # a value that it would refuse when it loads is refused here
    return configs
