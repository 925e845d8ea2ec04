"""The options of a stack's rendering, which `render` and `serve` share."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, get_args

from cosyvoice_triton import stacks
from cosyvoice_triton.config import LLMBackend, LLMEngine, LLMTransport
from cosyvoice_triton.server.options import Device, StackOptions, parse_settings

_FIELDS = {field.name: field for field in dataclasses.fields(StackOptions)}


def add_stack_options(parser: Any) -> None:
    """Add them to a parser or a group of one."""

    def add(name: str, help: str, **how: Any) -> None:
        """Add the option of a field, with the field's default."""
        parser.add_argument(f"--{name.replace('_', '-')}", default=_FIELDS[name].default, help=help, **how)

    add("stack", stacks.summaries(), choices=stacks.names())
    parser.add_argument(
        "--offline", dest="decoupled", action="store_false", help="one response per request, not a stream"
    )
    add("device", "of the models (default: auto, a GPU if there is one)", choices=get_args(Device))
    transports = "triton (default): the model tensorrt_llm of the same server; openai: the servers of --llm-urls"
    add("llm_transport", transports, choices=get_args(LLMTransport))
    parser.add_argument("--llm-urls", nargs="+", default=(), metavar="URL", help="OpenAI-compatible servers, http://…")
    add("llm_model", "name of the LLM at its server")
    add("llm_backend", "of the model tensorrt_llm (default: python)", choices=get_args(LLMBackend))
    engines = "of the python backend; auto (default): the first that is installed and can load the LLM, see docs/llm.md"
    add("llm_engine", engines, choices=get_args(LLMEngine))
    add("llm_engine_dir", "default: the directory for the engine in the checkpoints", type=Path)
    add("max_batch_size", "recordings per batch of the prompt models (default: %(default)s)", type=int)
    more = "another template key; may be repeated; an unknown one prints them all"
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help=more)


def given_options(args: argparse.Namespace) -> list[str]:
    """Return the names of the stack's options that differ from their defaults."""
    return [name for name, value in _values(args).items() if value not in (_FIELDS[name].default, [])]


def stack_options(models: Path, args: argparse.Namespace) -> StackOptions:
    """Return a command line's options, with the checkpoints in `models`. Raise ValueError naming an invalid one."""
    values = _values(args) | {"llm_urls": tuple(args.llm_urls), "settings": parse_settings(args.settings)}
    return StackOptions(models_dir=models, **values)


def _values(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name in _FIELDS and name != "models_dir"}
