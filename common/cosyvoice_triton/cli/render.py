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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from cosyvoice_triton import stacks
from cosyvoice_triton.config import LLMBackend, LLMEngine, LLMTransport
from cosyvoice_triton.prepare.missing import parse_settings, remedy
from cosyvoice_triton.server.rendering import Device, StackOptions, render


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models_dir", type=Path, help="directory with the checkpoints")
    parser.add_argument("destination", type=Path, help="a new directory, or an earlier rendering")
    parser.add_argument("--stack", choices=stacks.names(), default=stacks.DEFAULT.name, help=stacks.summaries())
    parser.add_argument(
        "--offline",
        dest="decoupled",
        action="store_false",
        help="one response per request, not a stream",
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
    parser.add_argument("--llm-engine-dir", type=Path, help="default: the directory for the engine in models_dir")
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
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    given = vars(build_parser().parse_args(argv))
    destination: Path = given.pop("destination")
    try:
        options = StackOptions(
            **given | {"llm_urls": tuple(given["llm_urls"]), "settings": parse_settings(given["settings"])}
        )
        if missing := options.missing_files():
            print(f"{missing[0]} is missing; {remedy(options, missing[0])}", file=sys.stderr)
            return 1
        render(options, destination)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"rendered the {options.stack} stack to {destination}: {', '.join(options.models)}")
    print(f"settings given: {' '.join(given['settings']) or 'none'}; all others have the stack's defaults")
    return 0


if __name__ == "__main__":
    sys.exit(main())
