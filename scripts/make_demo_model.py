"""Write the demo checkpoint: every model of both stacks with RANDOM weights, small, in the official layout and formats.

    python -m scripts.make_demo_model DEST [--seed N]

DEST/cosyvoice2_llm/               HuggingFace Qwen2ForCausalLM with CosyVoice2's speech tokens
DEST/CosyVoice2-0.5B/              flow.pt (UNet), hift.pt, campplus.onnx, speech_tokenizer_v2.onnx
DEST/Step-Audio-2-mini/token2wav/  flow.pt (DiT), hift.pt, campplus.onnx, speech_tokenizer_v2_25hz.onnx

What it speaks is noise of speech-like length. A complete checkpoint of the same recipe and seed is kept.
"""

import argparse
import hashlib
import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs as a file, from anywhere, installed or not

import torch
from tqdm import tqdm

from common import flow, hift
from scripts import demo_model
from scripts.demo_model import speaker, speech_tokenizer
from scripts.demo_model.llm import make_llm
from scripts.demo_model.vocoder import write_dit_flow, write_hift, write_unet_flow

LLM_DIR = "cosyvoice2_llm"
UNET_DIR = "CosyVoice2-0.5B"
DIT_DIR = "Step-Audio-2-mini/token2wav"
MANIFEST = "demo_model.json"
ABOUT = "random weights, not a trained model"
NEEDED_BYTES = 200 * 2**20  # the checkpoint and, while it replaces an older one, that one
README = """# Demo checkpoint: random weights

Made by scripts/make_demo_model.py. Nothing here was trained: the weights are random numbers, and what the models speak
is noise. Layout and file formats are those of the official checkpoints, which go in their place.
"""

log = logging.getLogger("make_demo_model")


def parts(seed: int) -> dict[str, Callable[[Path], None]]:
    """What is written where, relative to the checkpoint. The two stacks share no weights, as officially."""
    return {
        LLM_DIR: lambda path: make_llm(path, seed),
        f"{UNET_DIR}/speech_tokenizer_v2.onnx": lambda path: _write_tokenizer(path, seed),
        f"{UNET_DIR}/campplus.onnx": lambda path: _write_speaker(path, seed),
        f"{UNET_DIR}/flow.pt": lambda path: write_unet_flow(path, seed),
        f"{UNET_DIR}/hift.pt": lambda path: write_hift(path, seed),
        f"{DIT_DIR}/speech_tokenizer_v2_25hz.onnx": lambda path: _write_tokenizer(path, seed + 1),
        f"{DIT_DIR}/campplus.onnx": lambda path: _write_speaker(path, seed + 1),
        f"{DIT_DIR}/flow.pt": lambda path: write_dit_flow(path, seed + 1),
        f"{DIT_DIR}/hift.pt": lambda path: write_hift(path, seed + 1),
    }


def _write_tokenizer(path: Path, seed: int) -> None:
    speech_tokenizer.write_speech_tokenizer(path, speech_tokenizer.random_weights(seed), ABOUT)


def _write_speaker(path: Path, seed: int) -> None:
    speaker.write_campplus(path, speaker.random_weights(seed), ABOUT)


def make_demo_model(dest: Path, seed: int = 0) -> bool:
    """Write the checkpoint to `dest` unless it is there already; return whether it was written.

    It is made beside `dest` and renamed, so that `dest` is complete or not there. Raises ValueError where `dest` is
    something else, or the disk is too full.
    """
    if is_complete(dest, seed):
        return False
    if dest.exists() and not (dest / MANIFEST).is_file() and (not dest.is_dir() or any(dest.iterdir())):
        raise ValueError(f"{dest} exists and is no demo checkpoint: name another directory, or remove it")
    dest.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(dest.parent).free
    if free < NEEDED_BYTES:
        raise ValueError(
            f"{dest.parent} has {free >> 20} MiB free, {NEEDED_BYTES >> 20} MiB are needed: free some disk"
        )
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}.", dir=dest.parent) as scratch:
        fresh = Path(scratch) / "new"
        _write(fresh, seed)
        if dest.exists():
            dest.rename(Path(scratch) / "old")
        fresh.rename(dest)
    return True


def is_complete(dest: Path, seed: int) -> bool:
    """Whether `dest` holds every file of this recipe and seed, at the size at which it was written."""
    try:
        manifest = json.loads((dest / MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: (dest / name).stat().st_size for name in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return manifest == _manifest(seed, sizes)


def _write(root: Path, seed: int) -> None:
    progress = tqdm(parts(seed).items(), desc="demo checkpoint (random weights)", unit="part")
    for name, write in progress:
        progress.set_postfix_str(name)
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    (root / "README.md").write_text(README, encoding="utf-8")
    sizes = {str(path.relative_to(root)): path.stat().st_size for path in sorted(root.rglob("*")) if path.is_file()}
    (root / MANIFEST).write_text(json.dumps(_manifest(seed, sizes), indent=2) + "\n", encoding="utf-8")


def _manifest(seed: int, sizes: dict[str, int]) -> dict:
    return {"weights": "random", "recipe": _recipe(), "seed": seed, "files": sizes}


def _recipe() -> str:
    """What the files are made by, the networks included: a checkpoint of other code is written anew."""
    rooms = (Path(room.__path__[0]) for room in (demo_model, flow, hift))
    sources = [Path(__file__), *(source for room in rooms for source in sorted(room.glob("*.py")))]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the demo checkpoint: random weights in the official layout.")
    parser.add_argument("dest", type=Path, help="directory to write, for example model_dir/demo")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    start = time.monotonic()
    try:
        written = make_demo_model(args.dest, args.seed)
    except (ValueError, OSError) as error:
        log.error("make_demo_model: %s", error)
        return 1
    state = f"written in {time.monotonic() - start:.1f} s" if written else "is there already"
    log.info("demo checkpoint %s: %s. Its weights are RANDOM: it speaks noise.", args.dest, state)
    return 0


if __name__ == "__main__":
    sys.exit(main())
