"""Make everything that serving reads, once: what is there and whole is kept, what was interrupted is completed.

    python -m scripts.prepare demo models/demo                     a small trained checkpoint, for a CPU
    python -m scripts.prepare download models/official             the official checkpoints, and the LLM's directory
    python -m scripts.prepare engine models/official               the LLM for TensorRT-LLM, in NVIDIA's image
    python -m scripts.prepare engine models/official --kind onnxruntime_genai        the LLM for a CPU

Several at a time wait for one another. HF_ENDPOINT names a mirror of the hub, HF_TOKEN who you are, and
CHECKPOINT_REVISIONS="REPOSITORY=COMMIT ..." what to fetch instead of the newest.
"""

import argparse
import fcntl
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools.prepare import engine, hub

LOCK = ".prepare.lock"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    demo = steps.add_parser("demo", help="the demo checkpoint")
    download = steps.add_parser("download", help="the official checkpoints")
    download.add_argument("--stack", choices=("dit", "unet"), default="dit")
    built = steps.add_parser("engine", help="what the LLM's engine reads")
    built.add_argument("--kind", choices=("tensorrt_llm", "onnxruntime_genai"), default="tensorrt_llm")
    built.add_argument("--max-batch-size", type=int, default=64, help="streams at a time (64)")
    built.add_argument("--tp-size", type=int, default=1, help="GPUs of tensor parallelism")
    built.add_argument("--pp-size", type=int, default=1, help="GPUs of pipeline parallelism")
    for step in (demo, download, built):
        step.add_argument("models", type=Path, help="the directory of the checkpoints")
    return parser


@contextmanager
def only_one(models: Path) -> Iterator[None]:
    """Wait until no other process prepares the same directory."""
    models.mkdir(parents=True, exist_ok=True)
    with (models / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process prepares {models}; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def revisions() -> dict[str, str]:
    """CHECKPOINT_REVISIONS as a dict; ValueError naming an item that is none of REPOSITORY=COMMIT."""
    pairs = os.environ.get("CHECKPOINT_REVISIONS", "").split()
    for pair in pairs:
        if pair.partition("=")[0] not in (hub.COSYVOICE2, hub.STEP_AUDIO2) or not pair.partition("=")[2]:
            raise ValueError(f"CHECKPOINT_REVISIONS: {pair!r} is not REPOSITORY=COMMIT of a repository that is fetched")
    return {repository: commit for repository, _, commit in (pair.partition("=") for pair in pairs)}


def demo(models: Path) -> None:
    from scripts.convert_genai import convert
    from tools.demo_model.make import make_demo_model

    made = make_demo_model(models)
    convert(models / "cosyvoice2_llm", models / "cosyvoice2_llm_genai", "fp32")
    report(models, made, "a small trained voice, see docs/demo_voice.md")


def download(models: Path, args: argparse.Namespace) -> None:
    wanted = revisions()
    for source in hub.sources(args.stack):
        made = hub.fetch(source, models, wanted.get(source.repository))
        report(models / source.directory, made, f"commit {hub.read_record(models)[source.repository]['commit']}")
    llm = models / "cosyvoice2_llm"
    if missing := not llm.exists():
        import torch

        from scripts.convert_llm import convert

        official = models / "CosyVoice2-0.5B"
        convert(official / "llm.pt", official / "CosyVoice-BlankEN", llm, torch.bfloat16)
    report(llm, missing, "the LLM as a HuggingFace directory")


def build(models: Path, args: argparse.Namespace) -> None:
    if args.kind == "tensorrt_llm":
        options = engine.EngineOptions(args.max_batch_size, args.tp_size, args.pp_size)
        report(models / engine.ENGINE, engine.build_engine(models, options), "the LLM's engine")
        return
    from scripts.convert_genai import convert

    destination = models / "cosyvoice2_llm_genai"
    report(destination, convert(models / "cosyvoice2_llm", destination, "int4"), "the LLM for a CPU")


def report(path: Path, made: bool, what: str) -> None:
    print(f"{path}: {'made' if made else 'there already'}, {what}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        if args.step == "demo":  # makes its directory itself, whole or not at all
            demo(args.models)
            return 0
        with only_one(args.models):
            (download if args.step == "download" else build)(args.models, args)
    except (ValueError, RuntimeError, OSError) as error:  # DownloadError and EngineError are RuntimeErrors
        print(f"prepare {args.step}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"prepare {args.step}: interrupted; run again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
