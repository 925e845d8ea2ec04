"""Make everything that serving reads. Complete parts are kept, interrupted ones are completed.

    python -m scripts.prepare demo models/demo                     a small trained checkpoint, for a CPU
    python -m scripts.prepare download models/official             the official checkpoints, and the LLM's directory
    python -m scripts.prepare engine models/official               the LLM for TensorRT-LLM, in NVIDIA's image
    python -m scripts.prepare engine models/official --kind onnxruntime_genai        the LLM for a CPU

Concurrent runs wait for one another. HF_ENDPOINT is a mirror of the hub, HF_TOKEN your access token, and
CHECKPOINT_REVISIONS="REPOSITORY=COMMIT ..." selects other revisions than the newest.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from common import stacks
from tools.prepare import steps


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subparsers = parser.add_subparsers(dest="step", required=True)
    demo = subparsers.add_parser("demo", help="the demo checkpoint")
    download = subparsers.add_parser("download", help="the official checkpoints")
    download.add_argument("--stack", choices=stacks.names(), default=stacks.DEFAULT.name, help=stacks.summaries())
    built = subparsers.add_parser("engine", help="the files that the LLM's engine loads")
    built.add_argument("--kind", choices=("tensorrt_llm", "onnxruntime_genai"), default="tensorrt_llm")
    built.add_argument("--max-batch-size", type=int, default=64, help="concurrent streams (64)")
    built.add_argument("--tp-size", type=int, default=1, help="GPUs of tensor parallelism")
    built.add_argument("--pp-size", type=int, default=1, help="GPUs of pipeline parallelism")
    for step in (demo, download, built):
        step.add_argument("models", type=Path, help="the directory of the checkpoints")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        if args.step == "demo":  # writes its directory atomically, so it needs no lock
            steps.demo(args.models)
            return 0
        with steps.only_one(args.models):
            (steps.download if args.step == "download" else steps.build)(args.models, args)
    except (ValueError, RuntimeError, OSError) as error:  # DownloadError and EngineError are RuntimeErrors
        print(f"prepare {args.step}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"prepare {args.step}: interrupted; run again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
