"""Render a stack: the Triton model repository of one choice of checkpoint, stack and LLM.

    python -m scripts.render models/demo build/dit                            everything in one tritonserver
    python -m scripts.render models/demo build/unet --stack unet --offline    one answer per request, HTTP too
    python -m scripts.render models/official build/dit --device gpu \\
        --llm-transport openai --llm-urls http://localhost:8000/v1 --llm-model cosyvoice2_llm

The destination is replaced as a whole. `--set key=value` reaches every other key of the models' templates.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from common import stacks
from common.config import LLMEngine
from common.server.rendering import StackOptions, render


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models_dir", type=Path, help="directory with the checkpoints")
    parser.add_argument("destination", type=Path, help="a new directory, or an earlier rendering")
    parser.add_argument("--stack", choices=stacks.names(), default=stacks.DEFAULT.name, help=stacks.summaries())
    parser.add_argument("--offline", action="store_true", help="one response per request instead of a stream of chunks")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto", help="of prompt models and vocoder")
    parser.add_argument("--llm-transport", choices=("triton", "openai"), default="triton")
    parser.add_argument("--llm-urls", nargs="+", default=(), metavar="URL", help="OpenAI-compatible servers, http://…")
    parser.add_argument("--llm-model", default="tensorrt_llm", help="the LLM's name at its server")
    parser.add_argument("--llm-backend", choices=("python", "tensorrtllm"), default="python")
    parser.add_argument("--llm-engine", choices=get_args(LLMEngine), default="auto")
    parser.add_argument("--llm-engine-dir", type=Path, help="default: what the engine reads among the models")
    parser.add_argument("--max-batch-size", type=int, default=16)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    return parser


def parse_settings(pairs: Sequence[str]) -> dict[str, str]:
    """`key=value` items as a dict; ValueError naming one that is no pair."""
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"--set {pair!r} is not KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def _remedy(options: StackOptions, missing: Path) -> str:
    """The command that makes a missing part of the checkpoint."""
    if missing == options.engine_dir and options.llm_backend == "tensorrtllm":
        return "convert the LLM with scripts/convert_checkpoint.py and build it with trtllm-build, see docs/llm.md"
    if missing == options.engine_dir and options.tokenizer_dir.exists():
        return f"run: python -m scripts.convert_genai --model-dir {options.tokenizer_dir} --output-dir {missing}"
    return f"for the demo checkpoint run: python -m tools.demo_model.make {options.models_dir}"


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        options = StackOptions(
            models_dir=args.models_dir,
            stack=args.stack,
            decoupled=not args.offline,
            device=args.device,
            llm_transport=args.llm_transport,
            llm_urls=tuple(args.llm_urls),
            llm_model=args.llm_model,
            llm_backend=args.llm_backend,
            llm_engine=args.llm_engine,
            llm_engine_dir=args.llm_engine_dir,
            max_batch_size=args.max_batch_size,
            settings=parse_settings(args.settings),
        )
        if missing := options.missing_files():
            print(f"{missing[0]} is missing; {_remedy(options, missing[0])}", file=sys.stderr)
            return 1
        render(options, args.destination)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"rendered the {args.stack} stack to {args.destination}: {', '.join(options.models)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
