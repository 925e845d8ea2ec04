"""Render a stack: write the Triton model repository for one choice of stack, checkpoint and LLM.

    cosyvoice-triton render models/demo build/dit                            everything in one tritonserver
    cosyvoice-triton render models/demo build/unet --stack unet --offline    one answer per request, HTTP too
    cosyvoice-triton render models/official build/small \\
        --set gpu_memory_gib=7.5 --set max_streams=4 --set prompt_device=cpu
    cosyvoice-triton render models/official build/dit --device gpu \\
        --llm-transport openai --llm-urls http://localhost:8000/v1 --llm-model cosyvoice2_llm

The destination is replaced as a whole, with the settings of an earlier rendering. `--set KEY=VALUE` sets any other key
of the model templates; docs/sizing.md#tuning and docs/llm.md explain the most important ones.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from cosyvoice_triton import stacks
from cosyvoice_triton.arguments import command_parser, reporting_errors
from cosyvoice_triton.config import LLMBackend, LLMEngine, LLMTransport
from cosyvoice_triton.server.options import Device, StackOptions, parse_settings, planned
from cosyvoice_triton.server.rendering import render, templates_of

_FIELDS = {field.name: field for field in dataclasses.fields(StackOptions)}


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser(__doc__)
    parser.add_argument("models_dir", type=Path, help="directory with the checkpoints")
    parser.add_argument("destination", type=Path, help="a new directory, or an earlier rendering")
    add_stack_options(parser)
    return parser


@reporting_errors()
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    render_stack(args.models_dir, args.destination, args)
    return 0


def render_stack(models: Path, destination: Path, args: argparse.Namespace) -> None:
    """Render and print what was rendered. ValueError or OSError if it cannot be."""
    options, plan = planned(stack_options(models, args))
    options.require_files()
    render(options, destination)
    print(f"rendered the {options.stack} stack to {destination}: {', '.join(templates_of(options))}")
    if plan:
        print(plan)
    others = "the defaults of plan and stack" if plan else "the stack's defaults"
    print(f"settings given: {' '.join(args.settings) or 'none'}; all others have {others}")


def add_stack_options(parser: Any) -> None:
    """Add the options of a rendering, which other commands share, to a parser or a group of one."""

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
