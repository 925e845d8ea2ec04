"""The steps of scripts.prepare: each makes what is missing and keeps what is complete."""

import argparse
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import stacks
from tools.prepare import engine, hub

LOCK = ".prepare.lock"


@contextmanager
def only_one(models: Path) -> Iterator[None]:
    """Lock the directory; waits while another process prepares it."""
    models.mkdir(parents=True, exist_ok=True)
    with (models / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is preparing {models}; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def revisions() -> dict[str, str]:
    """CHECKPOINT_REVISIONS as a dict; ValueError naming an item that is not REPOSITORY=COMMIT."""
    pairs = os.environ.get("CHECKPOINT_REVISIONS", "").split()
    fetched = {source.repository for stack in stacks.registered() for source in hub.sources(stack)}
    for pair in pairs:
        if pair.partition("=")[0] not in fetched or not pair.partition("=")[2]:
            raise ValueError(f"CHECKPOINT_REVISIONS: {pair!r} is not REPOSITORY=COMMIT of a repository that is fetched")
    return {repository: commit for repository, _, commit in (pair.partition("=") for pair in pairs)}


def demo(models: Path) -> None:
    from tools.demo_model.make import make_demo_model
    from tools.prepare.genai import convert

    made = make_demo_model(models)
    llm = stacks.DEFAULT.llm
    convert(models / llm.directory, models / llm.genai, "fp32")
    report(models, made, "a small trained voice, see docs/demo_voice.md")


def download(models: Path, args: argparse.Namespace) -> None:
    wanted, stack = revisions(), stacks.named(args.stack)
    for source in hub.sources(stack):
        made = hub.fetch(source, models, wanted.get(source.repository))
        report(models / source.directory, made, f"commit {hub.read_record(models)[source.repository]['commit']}")
    llm = models / stack.llm.directory
    if missing := not llm.exists():
        import torch

        from tools.prepare.huggingface_llm import convert

        official = models / stack.llm.download
        convert(official / stack.llm.weights, official / stack.llm.base, llm, torch.bfloat16)
    report(llm, missing, "the LLM as a HuggingFace directory")


def build(models: Path, args: argparse.Namespace) -> None:
    if args.kind == "tensorrt_llm":
        options = engine.EngineOptions(args.max_batch_size, args.tp_size, args.pp_size)
        report(models / engine.ENGINE, engine.build_engine(models, options), "the LLM's engine")
        return
    from tools.prepare.genai import convert

    llm = stacks.DEFAULT.llm
    destination = models / llm.genai
    report(destination, convert(models / llm.directory, destination, "int4"), "the LLM for a CPU")


def report(path: Path, made: bool, what: str) -> None:
    print(f"{path}: {'made' if made else 'exists already'}, {what}", flush=True)
