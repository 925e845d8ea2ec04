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
    parser.add_argument("--stack", choices=stacks.names(), default=stacks.DEFAULT.name, help=stacks.summaries())
    parser.add_argument(
        "--offline", dest="decoupled", action="store_false", help="one response per request, not a stream"
    )
    parser.add_argument(
        "--device",
        choices=get_args(Device),
        default=StackOptions.device,
        help="of the models (default: auto, a GPU if there is one)",
    )
    parser.add_argument(
        "--llm-transport",
        choices=get_args(LLMTransport),
        default=StackOptions.llm_transport,
        help="triton (default): the model tensorrt_llm of the same server; openai: the servers of --llm-urls",
    )
    parser.add_argument("--llm-urls", nargs="+", default=(), metavar="URL", help="OpenAI-compatible servers, http://…")
    parser.add_argument("--llm-model", default=StackOptions.llm_model, help="name of the LLM at its server")
    parser.add_argument(
        "--llm-backend",
        choices=get_args(LLMBackend),
        default=StackOptions.llm_backend,
        help="of the model tensorrt_llm (default: python)",
    )
    parser.add_argument(
        "--llm-engine",
        choices=get_args(LLMEngine),
        default=StackOptions.llm_engine,
        help="of the python backend; auto (default): the first that is installed and can load the LLM, see docs/llm.md",
    )
    parser.add_argument("--llm-engine-dir", type=Path, help="default: the directory for the engine in the checkpoints")
    parser.add_argument(
        "--max-batch-size",
        type=int,
        default=StackOptions.max_batch_size,
        help="recordings per batch of the prompt models (default: %(default)s)",
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another template key; may be repeated; an unknown one prints them all",
    )


def given_options(args: argparse.Namespace) -> list[str]:
    """Return the names of the stack's options that differ from their defaults."""
    return [name for name, value in _values(args).items() if value not in (_FIELDS[name].default, [])]


def stack_options(models: Path, args: argparse.Namespace) -> StackOptions:
    """Return a command line's options, with the checkpoints in `models`. Raise ValueError naming an invalid one."""
    values = _values(args) | {"llm_urls": tuple(args.llm_urls), "settings": parse_settings(args.settings)}
    return StackOptions(models_dir=models, **values)


def _values(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name in _FIELDS and name != "models_dir"}
