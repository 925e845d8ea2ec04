"""Fill in templates of config.pbtxt, and render the models of a stack into a repository that Triton can serve.

A template is a config.pbtxt with `${key}` placeholders for what follows from the rendering's options or has to be
given. Every other setting in `config` can be given, too: the rendering then adds it to the model's parameters.
"""

import dataclasses
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cosyvoice_triton import stacks
from cosyvoice_triton.config import (
    AudioTokenizerConfig,
    ModelConfig,
    OrchestratorConfig,
    SpeakerEmbeddingConfig,
    TensorrtLLMConfig,
    Token2WavConfig,
    format_setting,
)
from cosyvoice_triton.replicas import first_replica, replicas
from cosyvoice_triton.server.options import StackOptions

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"  # links to the template folders of the checkout

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

_PLACEHOLDER = re.compile(r"\$\{(\w+)\}")
_PARAMETER = re.compile(r'key:\s*"(\w+)"\s*value:?\s*\{\s*string_value:\s*"([^"]*)"')


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
    return settings_of(name).parameters().keys() - dict(_PARAMETER.findall(template)).keys()


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
    from google.protobuf import text_format  # here: a machine is checked before anything is installed
    from tritonclient.grpc import model_config_pb2

    try:
        message = text_format.Parse(config, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise ValueError(f"{name}: not a valid config.pbtxt: {error}") from error
    if message.name != name:
        raise ValueError(f"{name}: the template belongs to model {message.name!r}")
    return message


def templates_of(options: StackOptions) -> dict[str, Path]:
    """Return the models of the stack, with the directories of their templates."""
    shared = [name for name in _SHARED if name != "tensorrt_llm" or options.llm_transport == "triton"]
    stack = stacks.named(options.stack)
    own = TEMPLATES / stack.templates  # an absolute path stays as it is
    folders = {name: own if (own / name).is_dir() else TEMPLATES / stacks.SHARED_TEMPLATES for name in shared}
    folders |= dict.fromkeys((*replicas(stack.token2wav, len(options.token2wav_gpus)), stack.orchestrator), own)
    return {name: folder / first_replica(name) for name, folder in folders.items()}


def render(options: StackOptions, destination: Path) -> None:
    """Write the stack's model repository to `destination`, atomically.

    Replaces an earlier rendering. ValueError for any other directory that is not empty.
    """
    if destination.exists() and any(destination.iterdir()) and not (destination / MARKER).exists():
        raise ValueError(f"{destination} is not empty and not an earlier rendering; choose another or remove it")
    configs = filled_configs(options)
    for name, config in configs.items():
        parse(config, name)
    destination.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        for name, source in templates_of(options).items():
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


def filled_configs(options: StackOptions) -> dict[str, str]:
    """Return the config.pbtxt of each model. ValueError for a setting that it could not load with."""
    templates = {name: (source / "config.pbtxt").read_text() for name, source in templates_of(options).items()}
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
        model = settings_of(name)
        # A value that it would refuse when it loads is refused here.
        model(**model.parsed(dict(_PARAMETER.findall(configs[name]))))
    return configs
