"""The steps of `cosyvoice-triton prepare`: each makes what is missing and keeps what is complete."""

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cosyvoice_triton import samples, stacks
from cosyvoice_triton.demo_checkpoint import STACKS
from cosyvoice_triton.llm.checkpoint import made_from
from cosyvoice_triton.prepare import hub
from cosyvoice_triton.prepare.demo import copy_demo
from cosyvoice_triton.stacks import SpeechLLM
from cosyvoice_triton.voice.book import SPK2INFO
from cosyvoice_triton.voice.files import read_spk2info

STAMP = ".built.json"
MAX_TOKENS = 32768  # in one step, upstream's
LOCK = ".prepare.lock"
PYTHON_PATH = "python"
VOICE = "sample"


def build_engine(models: Path, llm: SpeechLLM, max_batch_size: int, tp_size: int, pp_size: int) -> bool:
    """Build the engine of an LLM from its HuggingFace directory, both below `models`; False if the same one exists.

    It is built again for another checkpoint or option, and is written atomically. max_batch_size: concurrent streams.
    tp_size, pp_size: GPUs of tensor and pipeline parallelism.
    """
    source, destination = models / llm.directory, models / llm.engine
    options = {"max_batch_size": max_batch_size, "tp_size": tp_size, "pp_size": pp_size}
    wanted = {"options": options, "checkpoint": _fingerprint(source)}
    if _stamp(destination) == wanted:
        return False
    with tempfile.TemporaryDirectory(dir=models, prefix=f".{llm.engine}.") as scratch:
        weights, built = Path(scratch) / "weights", Path(scratch) / "engine"
        sizes = [f"--tp_size={tp_size}", f"--pp_size={pp_size}"]
        python = os.environ.get("TRTLLM_PYTHON") or sys.executable  # in the image another one has TensorRT-LLM
        convert = [python, "-m", "cosyvoice_triton", "prepare", "convert-checkpoint", "--dtype=bfloat16", *sizes]
        _run([*convert, f"--model_dir={source}", f"--output_dir={weights}"])
        limits = [f"--max_batch_size={max_batch_size}", f"--max_num_tokens={MAX_TOKENS}"]
        workers = [f"--workers={tp_size * pp_size}"]
        directories = [f"--checkpoint_dir={weights}", f"--output_dir={built}"]
        _run(["trtllm-build", *directories, *limits, "--gemm_plugin=bfloat16", *workers])
        (built / STAMP).write_text(json.dumps(wanted, indent=1) + "\n")
        if destination.exists():
            shutil.rmtree(destination)
        built.rename(destination)
    return True


def _run(command: list[str]) -> None:
    print("+", *command, flush=True)
    try:
        finished = subprocess.run(command, check=False)
    except FileNotFoundError:
        raise RuntimeError(
            f"{command[0]} is not installed: build the engine in the target trtllm of Dockerfile.server"
        ) from None
    if finished.returncode:
        raise RuntimeError(f"{command[0]} ended with code {finished.returncode}")


def _fingerprint(source: Path) -> dict[str, list[int]]:
    """Return the sizes and modification times of the files that the engine is built from."""
    files = [source / "config.json", *sorted(source.glob("*.safetensors"))]
    if len(files) < 2 or not files[0].is_file():
        raise RuntimeError(
            f"{source} is not a HuggingFace directory of the LLM; run: cosyvoice-triton prepare download"
        )
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


def _stamp(destination: Path) -> object:
    try:
        return json.loads((destination / STAMP).read_text())
    except (OSError, ValueError):
        return None


@contextmanager
def only_one(models: Path) -> Iterator[None]:
    """Lock the directory; wait while another process prepares it."""
    models.mkdir(parents=True, exist_ok=True)
    with (models / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is preparing {models}; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def revisions() -> dict[str, str]:
    """Return CHECKPOINT_REVISIONS as a dict. Raise ValueError naming an item that is not REPOSITORY=COMMIT."""
    pairs = os.environ.get("CHECKPOINT_REVISIONS", "").split()
    parts = [part for stack in stacks.registered() for part in (stack, stack.llm)]
    fetched = {name for part in parts for name in (part.repository, part.modelscope) if name}
    for pair in pairs:
        if pair.partition("=")[0] not in fetched or not pair.partition("=")[2]:
            raise ValueError(f"CHECKPOINT_REVISIONS: {pair!r} is not REPOSITORY=COMMIT of a repository that is fetched")
    return {repository: commit for repository, _, commit in (pair.partition("=") for pair in pairs)}


def demo(models: Path, stack: str = stacks.DEFAULT.name) -> bool:
    """Copy the trained demo checkpoint and make its LLM's form for a CPU; return whether a file was missing.

    ValueError if `stack` has no trained demo voice.
    """
    from cosyvoice_triton.prepare.genai import convert

    if stacks.named(stack) not in STACKS:
        raise ValueError(f"no trained demo voice for {stack}, only for {', '.join(each.name for each in STACKS)}")
    llm = stacks.named(stack).llm
    with only_one(models):
        made = copy_demo(models)
        convert(models / llm.directory, models / llm.genai, "fp32")
    return made


def download(models: Path, args: argparse.Namespace) -> None:
    wanted, stack = revisions(), stacks.named(args.stack)
    weights = stack.llm.reinforced if args.rl else stack.llm.weights
    if not weights:
        raise ValueError(f"the {stack.name} stack has one LLM only: leave --rl out")
    sources = hub.sources(stack, args.hub, weights)
    for source, made in zip(sources, hub.fetch(sources, models, wanted), strict=True):
        report(models / source.directory, made, f"commit {hub.read_record(models)[source.repository]['commit']}")
    llm = models / stack.llm.directory
    if missing := not llm.exists():
        import torch

        from cosyvoice_triton.prepare.huggingface_llm import convert

        official = models / stack.llm.download
        convert(official / weights, official / stack.llm.base, llm, torch.bfloat16)
    elif (found := made_from(llm)) not in ("", weights):
        raise ValueError(f"{llm} was made from {found}: remove it, and what was made from it, to use {weights}")
    report(llm, missing, "the LLM as a HuggingFace directory")
    find_silence(models / stack.checkpoint, stack)
    first_voice(models / "voices")
    if args.spk2info:
        if not stack.speakers:
            raise ValueError(f"upstream has no spk2info.pt for the {stack.name} stack: leave --spk2info out")
        speakers(stack.speakers, models / stack.checkpoint / SPK2INFO)
    if args.python_path:
        copy_package(models / PYTHON_PATH)


def find_silence(checkpoint: Path, stack: stacks.Stack) -> None:
    """Write which speech tokens of a checkpoint are silence beside it, unless they are known."""
    from cosyvoice_triton.prepare import silence
    from cosyvoice_triton.voice.silent_tokens import FILE

    if not stack.silent_tokens:
        missing = not (checkpoint / FILE).exists()
        report(checkpoint / FILE, missing, f"{len(silence.prepared(checkpoint, stack))} speech tokens of silence")


def first_voice(voices: Path) -> None:
    """Register a recording of the package as VOICE, unless there are voices: official checkpoints come without any."""
    if missing := not voices.exists() or not any(voices.iterdir()):
        voices.mkdir(exist_ok=True)
        sample = json.loads(samples.MANIFEST.read_text(encoding="utf-8").splitlines()[0])
        (voices / f"{VOICE}.txt").write_text(sample["prompt_text"], encoding="utf-8")
        shutil.copyfile(samples.FOLDER / sample["prompt_audio"], voices / f"{VOICE}.wav")
    report(voices, missing, f"the voice {VOICE!r}, CC-BY-SA-3.0 (samples/README.md)" if missing else "voices")


def copy_package(directory: Path) -> None:
    """Copies the modules of this package to `directory`, in place of an earlier version's.

    `vllm serve` imports our logits processor, but its image does not have this package.
    """
    package = Path(__file__).resolve().parents[1]
    shutil.rmtree(directory, ignore_errors=True)
    for path in (*package.rglob("*.py"), package / "text" / "reading.txt"):
        copy = directory / package.name / path.relative_to(package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    report(directory, True, "this package, for vLLM")


def speakers(url: str, path: Path) -> None:
    """Download a file of speakers by name, unless `path` exists. ValueError if it is no such file."""
    if missing := not path.exists():
        fresh = path.with_name(f"{path.name}.new")
        try:
            hub.download(url, fresh)
            read_spk2info(fresh)
            fresh.rename(path)
        finally:
            fresh.unlink(missing_ok=True)
    report(path, missing, "speakers by name")


def build(models: Path, args: argparse.Namespace) -> None:
    llm = stacks.named(args.stack).llm
    if args.kind == "tensorrt_llm":
        made = build_engine(models, llm, args.max_batch_size, args.tp_size, args.pp_size)
        report(models / llm.engine, made, "the LLM's engine")
        return
    from cosyvoice_triton.prepare.genai import convert

    destination = models / llm.genai
    made = convert(models / llm.directory, destination, args.precision, lambda line: print(line, flush=True))
    report(destination, made, f"the LLM for a CPU{f', {args.precision}' if made else ''}")


def plans(models: Path, args: argparse.Namespace) -> None:
    """Build the stack's plans. RuntimeError if one could not be built, ValueError if the stack has none or its
    checkpoint is not there."""
    from cosyvoice_triton.export import engines, onnx

    stack = stacks.named(args.stack)
    if not stack.networks:
        raise ValueError(f"the flow of the {stack.name} stack runs in torch only: it has no plans")
    directory = models / stack.checkpoint
    if any(not (directory / file).exists() for file in stack.networks.values()):
        if not (directory / stack.flow).exists():
            download = f"cosyvoice-triton prepare download {models} --stack {stack.name}"
            raise ValueError(f"{directory / stack.flow} is missing; run: {download}")
        if onnx.main(["--model-dir", str(directory)]):
            raise RuntimeError(f"not every network of {directory} was exported; the output is above")
    if not engines.build_all(stack, directory, args.precision, args.capability, args.device):
        raise RuntimeError(f"not every plan of {directory} was built; the output is above")


def report(path: Path, made: bool, what: str) -> None:
    print(f"{path}: {'made' if made else 'exists already'}, {what}", flush=True)
