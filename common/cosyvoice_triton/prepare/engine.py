"""The LLM's TensorRT-LLM engine, built once per checkpoint and options."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from cosyvoice_triton.stacks import SpeechLLM

STAMP = ".built.json"
MAX_TOKENS = 32768  # in one step, upstream's


class EngineError(RuntimeError):
    """The engine could not be built; the output of the tools is above."""


@dataclass(frozen=True)
class EngineOptions:
    """Concurrent streams, and GPUs of tensor and pipeline parallelism."""

    max_batch_size: int = 64
    tp_size: int = 1
    pp_size: int = 1


def build_engine(models: Path, llm: SpeechLLM, options: EngineOptions) -> bool:
    """Build the engine of an LLM from its HuggingFace directory, both below `models`; False if the same one exists.

    It is built again for another checkpoint or option, and is written atomically.
    """
    source, destination = models / llm.directory, models / llm.engine
    wanted = {"options": asdict(options), "checkpoint": _fingerprint(source)}
    if _stamp(destination) == wanted:
        return False
    with tempfile.TemporaryDirectory(dir=models, prefix=f".{llm.engine}.") as scratch:
        weights, built = Path(scratch) / "weights", Path(scratch) / "engine"
        sizes = [f"--tp_size={options.tp_size}", f"--pp_size={options.pp_size}"]
        python = os.environ.get("TRTLLM_PYTHON") or sys.executable  # in the image another one has TensorRT-LLM
        convert = [python, "-m", "cosyvoice_triton", "prepare", "convert-checkpoint", "--dtype=bfloat16", *sizes]
        _run([*convert, f"--model_dir={source}", f"--output_dir={weights}"])
        limits = [f"--max_batch_size={options.max_batch_size}", f"--max_num_tokens={MAX_TOKENS}"]
        workers = [f"--workers={options.tp_size * options.pp_size}"]
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
        raise EngineError(
            f"{command[0]} is not installed: build the engine in the target trtllm of Dockerfile.server"
        ) from None
    if finished.returncode:
        raise EngineError(f"{command[0]} ended with code {finished.returncode}")


def _fingerprint(source: Path) -> dict[str, list[int]]:
    """Return the sizes and modification times of the files that the engine is built from."""
    files = [source / "config.json", *sorted(source.glob("*.safetensors"))]
    if len(files) < 2 or not files[0].is_file():
        raise EngineError(f"{source} is not a HuggingFace directory of the LLM; run: cosyvoice-triton prepare download")
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


def _stamp(destination: Path) -> object:
    try:
        return json.loads((destination / STAMP).read_text())
    except (OSError, ValueError):
        return None
