"""Write the demo checkpoint: every model of the stacks, small, in the official layout and formats.

    python -m cosyvoice_triton.demo_checkpoint.make DEST  the trained voice of demo_voice/README.md
    python -m cosyvoice_triton.demo_checkpoint.make DEST --weights random [--seed N]    noise of speech-like length:
    sizes, parity
    python -m cosyvoice_triton.demo_checkpoint.make DEST --weights random-full  the same at official sizes: speed

DEST/cosyvoice2_llm/               HuggingFace Qwen2ForCausalLM with CosyVoice2's speech tokens
DEST/CosyVoice2-0.5B/              flow.pt (UNet), hift.pt, campplus.onnx, speech_tokenizer_v2.onnx
DEST/Step-Audio-2-mini/token2wav/  flow.pt (DiT), hift.pt, campplus.onnx, speech_tokenizer_v2_25hz.onnx
DEST/cosyvoice3_llm/, DEST/Fun-CosyVoice3-0.5B-2512/
                                   the same of CosyVoice3, random weights only
DEST/voices/                       registered voices, trained weights only

With random-full the speaker encoder is still small, since CAM++'s network is not part of this repository.

An existing complete checkpoint of the same weights is kept. When one is replaced, its registered voices are kept.
"""

import hashlib
import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tqdm import tqdm

from cosyvoice_triton import demo_checkpoint as demo_model
from cosyvoice_triton import stacks
from cosyvoice_triton.arguments import command_parser, reporting_errors
from cosyvoice_triton.demo_checkpoint import checkpoint, llm, speaker, speech_tokenizer, vocoder
from cosyvoice_triton.llm import speech_tokens
from cosyvoice_triton.llm.checkpoint import DEMO_MANIFEST
from cosyvoice_triton.networks import flow, hift
from cosyvoice_triton.stacks import Stack

VOICES_DIR = "voices"
MANIFEST = DEMO_MANIFEST
ABOUT = "random weights, not a trained model"
README = """# Demo checkpoint: random weights

Made by demo_checkpoint/make.py. Nothing here was trained: the weights are random numbers, and the speech is noise.
Layout and file formats are those of the official checkpoints, which can replace this one.
"""

Writer = Callable[[Path], None]
Generator = type[hift.HiFTGenerator] | type[hift.CausalHiFTGenerator]
Weights = Literal["trained", "random", "random-full"]
# Disk space for the checkpoint and for an older one that it replaces.
NEEDED_BYTES: dict[Weights, int] = {"trained": 200 << 20, "random": 200 << 20, "random-full": 12 << 30}

log = logging.getLogger("demo_model")


@dataclass(frozen=True)
class CheckpointSizes:
    """Sizes of the networks with random weights."""

    lm: llm.LLMSizes = llm.SMALL
    lm_dtype: torch.dtype = torch.float32
    tokenizer: tuple[int, int] = speech_tokenizer.SMALL
    third_tokenizer: tuple[int, int] = speech_tokenizer.SMALL
    unet: flow.UNetFlowConfig = vocoder.UNET_FLOW
    dit: flow.DiTFlowConfig = vocoder.DIT_FLOW
    cosyvoice3: flow.CosyVoice3FlowConfig = vocoder.COSYVOICE3_FLOW
    generator: hift.HiFTConfig = vocoder.HIFT


SMALL = CheckpointSizes()
OFFICIAL = CheckpointSizes(
    llm.OFFICIAL,
    torch.bfloat16,
    speech_tokenizer.OFFICIAL,
    speech_tokenizer.OFFICIAL_THIRD,
    flow.UNetFlowConfig(),
    flow.DiTFlowConfig(),
    flow.CosyVoice3FlowConfig(),
    hift.HiFTConfig(),
)


def parts(sizes: CheckpointSizes, seed: int) -> dict[str, Writer]:
    """Return path in the checkpoint -> function that writes it. The stacks share no weights, as in official ones."""
    found: dict[str, Writer] = {
        model.directory: partial(llm.make_llm, seed=seed, sizes=sizes.lm, dtype=sizes.lm_dtype, rules=model.tokenizer)
        for model in dict.fromkeys(stack.llm for stack in stacks.BUILT_IN)
    }
    flows: dict[Stack, tuple[Callable[..., None], Any, Generator]] = {
        stacks.UNET: (vocoder.write_unet_flow, sizes.unet, hift.HiFTGenerator),
        stacks.DIT: (vocoder.write_dit_flow, sizes.dit, hift.HiFTGenerator),
        stacks.COSYVOICE3: (vocoder.write_cosyvoice3_flow, sizes.cosyvoice3, hift.CausalHiFTGenerator),
    }
    for number, (stack, (write_flow, config, generator)) in enumerate(flows.items()):
        found |= _parts_of(
            stack, seed + number, sizes, partial(write_flow, seed=seed + number, sizes=config), generator
        )
    return found


def _parts_of(
    stack: Stack, seed: int, sizes: CheckpointSizes, write_flow: Writer, generator: Generator
) -> dict[str, Writer]:
    """Return the files of a stack's checkpoint, each with the function that writes it."""
    files: dict[str, Writer] = {
        stack.speech_tokenizer: lambda path: _write_tokenizer(path, seed, sizes),
        stack.speaker_encoder: lambda path: speaker.write_campplus(path, speaker.random_weights(seed), ABOUT),
        stack.flow: write_flow,
        stack.hift: lambda path: vocoder.write_hift(path, seed, sizes.generator, generator),
    }
    return {str(stack.checkpoint / name): write for name, write in files.items()}


def _write_tokenizer(path: Path, seed: int, sizes: CheckpointSizes) -> None:
    third = path.name == stacks.COSYVOICE3.speech_tokenizer
    weights = speech_tokenizer.random_weights(seed, *(sizes.third_tokenizer if third else sizes.tokenizer))
    speech_tokenizer.write_speech_tokenizer(path, weights, ABOUT)


def make_demo_model(dest: Path, weights: Weights = "trained", seed: int = 0) -> bool:
    """Write the checkpoint to `dest` unless it exists already; return whether it was written.

    It is written next to `dest` and renamed, so that `dest` is complete or missing. A mount point cannot be renamed:
    its entries are replaced one by one, the manifest first, so that an incomplete checkpoint is made again. seed: of
    random weights. ValueError if `dest` is something else, the disk is too full, or the trained checkpoint is damaged.
    """
    recipe = _recipe(weights, seed)
    known = _read_manifest(dest)
    if known is not None and known == _manifest(dest, weights, recipe, known["files"]):
        return False
    if dest.exists() and known is None and (not dest.is_dir() or any(dest.iterdir())):
        raise ValueError(f"{dest} exists and is no demo checkpoint: name another directory, or remove it")
    place = dest if dest.is_mount() else dest.parent
    place.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(place).free, NEEDED_BYTES[weights]
    if free < needed:
        raise ValueError(f"{place} has {free >> 20} MiB free, {needed >> 20} MiB are needed: free some disk")
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}.", dir=place) as scratch:
        fresh = Path(scratch) / "new"
        if weights == "trained":
            checkpoint.copy(fresh)
        else:
            _write_random(fresh, SMALL if weights == "random" else OFFICIAL, seed)
        names = [path.relative_to(fresh).as_posix() for path in sorted(fresh.rglob("*")) if path.is_file()]
        manifest = _manifest(fresh, weights, recipe, names)
        (fresh / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if known is not None:
            _keep_voices(dest / VOICES_DIR, fresh / VOICES_DIR, same_networks=known["recipe"] == recipe)
        _replace(dest, fresh, Path(scratch) / "old")
    return True


def _replace(dest: Path, fresh: Path, old: Path) -> None:
    """Move `fresh` to `dest`, and what `dest` has of the same names to `old`."""
    if not dest.is_mount():
        if dest.exists():
            dest.rename(old)
        fresh.rename(dest)
        return
    old.mkdir()
    for entry in sorted(fresh.iterdir(), key=lambda entry: entry.name != MANIFEST):
        if (dest / entry.name).exists():
            (dest / entry.name).rename(old / entry.name)
        entry.rename(dest / entry.name)


def weights_of(directory: Path) -> Literal["trained", "random"] | None:
    """Return the kind of weights in a demo checkpoint or in a directory of one; None if it is no demo checkpoint."""
    for candidate in (directory, *directory.resolve().parents):
        if (manifest := _read_manifest(candidate)) is not None:
            return "random" if str(manifest["weights"]).startswith("random") else "trained"
    return None


def _write_random(root: Path, sizes: CheckpointSizes, seed: int) -> None:
    # disable=None: no bar if standard error is no terminal, whose log would get a line for each of its states.
    progress = tqdm(parts(sizes, seed).items(), desc="demo checkpoint (random weights)", unit="part", disable=None)
    for name, write in progress:
        progress.set_postfix_str(name)
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    (root / "README.md").write_text(README, encoding="utf-8")


def _keep_voices(old: Path, fresh: Path, same_networks: bool) -> None:
    """Keep registered voices. Precomputed features (.safetensors) are kept only if the networks are the same."""
    for path in sorted(old.iterdir()) if old.is_dir() else ():
        if path.is_file() and not (fresh / path.name).exists() and (same_networks or path.suffix in (".wav", ".txt")):
            fresh.mkdir(exist_ok=True)
            shutil.copy2(path, fresh / path.name)


def _read_manifest(directory: Path) -> dict | None:
    """Return the manifest of a demo checkpoint; None if there is none or it is unreadable."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        return manifest if {"weights", "recipe", "files"} <= manifest.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _manifest(root: Path, weights: Weights, recipe: str, names: Iterable[str]) -> dict:
    """Return the content of the manifest: kind of weights, recipe, and sizes of the files in `root` (-1: missing)."""
    paths = {name: root / name for name in names}
    sizes = {name: path.stat().st_size if path.is_file() else -1 for name, path in paths.items()}
    return {"weights": weights, "recipe": recipe, "files": sizes}


def _recipe(weights: Weights, seed: int) -> str:
    """Return a digest of what the files depend on: the checksums of the trained checkpoint; or the seed and the sources
    that define random weights, including the networks, the tokens and the layout."""
    if weights == "trained":
        content = json.dumps(checkpoint.read_sums(checkpoint.TRAINED)).encode()
    else:
        rooms = (Path(room.__path__[0]) for room in (demo_model, flow, hift))
        modules = (Path(str(module.__file__)) for module in (stacks, speech_tokens))
        sources = [*modules, *(source for room in rooms for source in sorted(room.glob("*.py")))]
        content = b"".join((str(seed).encode(), *(source.read_bytes() for source in sources)))
    return hashlib.sha256(content).hexdigest()[:16]


@reporting_errors()
def main(argv: list[str] | None = None) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("dest", type=Path, help="directory to write, for example models/demo")
    parser.add_argument("--weights", choices=get_args(Weights), default="trained")
    parser.add_argument("--seed", type=int, default=0, help="seed of random weights")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    start = time.monotonic()
    written = make_demo_model(args.dest, args.weights, args.seed)
    state = f"written in {time.monotonic() - start:.1f} s" if written else "exists already"
    what = "a small trained voice" if args.weights == "trained" else "RANDOM weights, whose speech is noise"
    log.info("demo checkpoint %s: %s, %s", args.dest, state, what)
    return 0


if __name__ == "__main__":
    sys.exit(main())
