"""The parts of the checkpoints, and the directory that they are written to."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.demo_checkpoint import MANIFEST, has_random_weights
from cosyvoice_triton.llm import speech_tokens
from cosyvoice_triton.networks import flow, hift
from cosyvoice_triton.networks.hift import HiFTConfig
from cosyvoice_triton.voice.silent_tokens import FILE as SILENT_TOKENS

from tests.random_weights import llm, speaker, speech_tokenizer, token2wav

ABOUT = "random weights, not a trained model"
README = """# Random weights

Made by `python -m tests.random_weights`. Nothing here was trained, and the speech is noise. Layout and file formats are
those of the official checkpoints.
"""

Writer = Callable[[Path], object]
Weights = Literal["random", "random-full"]


@dataclass(frozen=True)
class CheckpointSizes:
    """Sizes of the networks. tokenizers: width and layers of version 2 and 3. flows: in the order of FLOWS."""

    lm: llm.LLMSizes
    lm_dtype: torch.dtype
    tokenizers: dict[str, tuple[int, int]]
    flows: tuple[Any, ...]
    generator: HiFTConfig


SMALL = CheckpointSizes(
    llm.SMALL,
    torch.float32,
    {"v2": speech_tokenizer.SMALL, "v3": speech_tokenizer.SMALL},
    (token2wav.UNET_FLOW, token2wav.DIT_FLOW, token2wav.COSYVOICE3_FLOW),
    token2wav.HIFT,
)
OFFICIAL = CheckpointSizes(
    llm.OFFICIAL,
    torch.bfloat16,
    {"v2": speech_tokenizer.OFFICIAL, "v3": speech_tokenizer.OFFICIAL_THIRD},
    (flow.UNetFlowConfig(), flow.DiTFlowConfig(), flow.CosyVoice3FlowConfig()),
    HiFTConfig(),
)


def parts(sizes: CheckpointSizes, seed: int, leading_silence: bool) -> dict[str, Writer]:
    """Return path in the checkpoint -> function that writes it. The stacks share no weights, as in official ones."""
    found: dict[str, Writer] = {
        model.directory: partial(
            llm.make_llm,
            seed=seed,
            sizes=sizes.lm,
            dtype=sizes.lm_dtype,
            rules=model.tokenizer,
            leading_silence=leading_silence,
        )
        for model in dict.fromkeys(stack.llm for stack in stacks.BUILT_IN)
    }
    for number, (stack, config) in enumerate(zip(token2wav.FLOWS, sizes.flows, strict=True)):
        own = seed + number
        files: dict[str, Writer] = {
            stack.speech_tokenizer: partial(_write_tokenizer, seed=own, sizes=sizes),
            stack.speaker_encoder: partial(speaker.write_campplus, weights=speaker.random_weights(own), about=ABOUT),
            stack.flow: partial(token2wav.write_flow, stack=stack, seed=own, sizes=config),
            stack.hift: partial(token2wav.write_hift, stack=stack, seed=own, sizes=sizes.generator),
        }
        if leading_silence:
            files[SILENT_TOKENS] = lambda path: path.write_text(json.dumps(list(llm.SILENT_IDS)), encoding="utf-8")
        found |= {str(stack.checkpoint / name): write for name, write in files.items()}
    return found


def _write_tokenizer(path: Path, seed: int, sizes: CheckpointSizes) -> None:
    width, layers = sizes.tokenizers["v3" if path.name == stacks.COSYVOICE3.speech_tokenizer else "v2"]
    speech_tokenizer.write_speech_tokenizer(path, speech_tokenizer.random_weights(seed, width, layers), ABOUT)


def make(dest: Path, weights: Weights = "random", seed: int = 0, leading_silence: bool = False) -> bool:
    """Write the checkpoint to `dest` unless it is there; return whether it was written. ValueError if `dest` is
    something else. leading_silence: answers begin with silent tokens, as `llm.SILENT_STARTS` says."""
    manifest = dest / MANIFEST
    wanted = {"weights": weights, "recipe": _recipe(seed), "leading_silence": leading_silence}
    if manifest.is_file() and json.loads(manifest.read_text(encoding="utf-8")) == wanted:
        return False
    dest.mkdir(parents=True, exist_ok=True)
    if any(dest.iterdir()) and not (manifest.is_file() and has_random_weights(dest)):
        raise ValueError(f"{dest} has no random weights: name another directory, or remove it")
    # First without a recipe: what an interrupted run leaves is made again.
    manifest.write_text(json.dumps({"weights": weights}), encoding="utf-8")
    for entry in dest.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
    for name, write in parts(SMALL if weights == "random" else OFFICIAL, seed, leading_silence).items():
        print(f"random weights: {dest / name}", flush=True)
        (dest / name).parent.mkdir(parents=True, exist_ok=True)
        write(dest / name)
    (dest / "README.md").write_text(README, encoding="utf-8")
    manifest.write_text(json.dumps(wanted) + "\n", encoding="utf-8")
    return True


def _recipe(seed: int) -> str:
    """Return a digest of what the files depend on: the seed and the sources, of the networks, tokens and layout too."""
    folders = (Path(__file__).parent, *(Path(package.__path__[0]) for package in (flow, hift)))
    sources = [Path(str(module.__file__)) for module in (stacks, speech_tokens)]
    sources += [source for folder in folders for source in sorted(folder.glob("*.py"))]
    return hashlib.sha256(b"".join((str(seed).encode(), *(path.read_bytes() for path in sources)))).hexdigest()[:16]
