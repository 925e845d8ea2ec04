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
from collections.abc import Sequence
from pathlib import Path

from cosyvoice_triton.arguments import command_parser, reporting_errors
from cosyvoice_triton.cli.stack_options import add_stack_options, stack_options
from cosyvoice_triton.prepare.missing import require_files
from cosyvoice_triton.server.options import planned
from cosyvoice_triton.server.rendering import render, templates_of


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
    require_files(options)
    render(options, destination)
    print(f"rendered the {options.stack} stack to {destination}: {', '.join(templates_of(options))}")
    if plan:
        print(plan)
    others = "the defaults of plan and stack" if plan else "the stack's defaults"
    print(f"settings given: {' '.join(args.settings) or 'none'}; all others have {others}")
