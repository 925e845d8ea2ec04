"""Stage `export`: everything trained so far as a checkpoint in the official layout, in half precision, with voices."""

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import soundfile
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import SAMPLE_RATE, TOKEN_RATE
from cosyvoice_triton.demo_checkpoint import TRAINED
from cosyvoice_triton.llm.speech_tokens import COSYVOICE3
from cosyvoice_triton.prepare.demo import CARD, SUMS, sha256
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.voice.silent_tokens import silent_tokens

from demo_voice.training import flow, flow_cosyvoice3, flow_dit, flow_unet, llm, speaker, tokenizer
from demo_voice.training.dataset import TOKEN_SAMPLES
from demo_voice.training.kokoro import DEMO_VOICES
from demo_voice.training.llm_data import COSYVOICE2_NAMES

logger = logging.getLogger(__name__)

VOICE_SECONDS = (5.0, 6.5)
VOICE_WORDS = 12

# Checkpoint file: (trained file, function that converts it).
Part = tuple[str, Callable[[Path, Path], object]]


def _parts_of(stack: Stack, of_flow: Part, trained: Stack) -> dict[str, Part]:
    """The files of a stack's checkpoint. trained: the stack whose vocoder it has, as it is in the package now."""
    hift = TRAINED / trained.checkpoint / trained.hift
    files: dict[str, Part] = {
        stack.flow: of_flow,
        stack.hift: (str(hift), lambda work, path: shutil.copyfile(hift, path)),
        stack.speaker_encoder: (speaker.FILE, speaker.export),
        stack.speech_tokenizer: (tokenizer.FILE, tokenizer.export),
    }
    return {str(stack.checkpoint / name): part for name, part in files.items()}


_PARTS: dict[str, Part] = {
    stacks.COSYVOICE2_LLM.directory: (llm.FILE, partial(llm.export, rules=COSYVOICE2_NAMES)),
    stacks.COSYVOICE3_LLM.directory: (llm.FILE, partial(llm.export, rules=COSYVOICE3)),
    **_parts_of(stacks.UNET, (flow_unet.FILE, partial(flow.export, flow_unet.FILE)), stacks.UNET),
    **_parts_of(stacks.DIT, (flow_dit.FILE, partial(flow.export, flow_dit.FILE)), stacks.UNET),
    **_parts_of(stacks.COSYVOICE3, (flow_cosyvoice3.FILE, flow_cosyvoice3.export), stacks.COSYVOICE3),
}


def export(work: Path, checkpoint: Path) -> None:
    """Replace `checkpoint`: every part that was trained, the voices and the list of checksums. Equal files, of
    several stacks, are in it once: `copy_demo` completes the folders."""
    shutil.rmtree(checkpoint, ignore_errors=True)
    for name, (source, write) in _PARTS.items():
        if not (work / source).is_file():
            logger.warning("export: %s is missing, so %s is not written", source, name)
            continue
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        write(work, checkpoint / name)
    for stack in stacks.BUILT_IN:
        # Those of this speech tokenizer, also if the stack has a list, which is of the official one.
        silent_tokens(checkpoint / stack.checkpoint, replace(stack, silent_tokens=frozenset()))
    _write_voices(work, checkpoint / "voices")
    write_sums(checkpoint)
    remove_copies(checkpoint)
    sizes = {name: (checkpoint / name).stat().st_size for name in files_of(checkpoint)}
    for name, size in sizes.items():
        logger.info("export: %10d bytes  %s", size, name)
    logger.info("export: %s, %.1f MB", checkpoint, sum(sizes.values()) / 1e6)


def files_of(checkpoint: Path) -> list[str]:
    """The files that have a checksum: all but the list of checksums and the model card."""
    found = (path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())
    return sorted(name for name in found if name not in (SUMS, CARD))


def write_sums(checkpoint: Path) -> None:
    sums = "".join(f"{sha256(checkpoint / name)}  {name}\n" for name in files_of(checkpoint))
    (checkpoint / SUMS).write_text(sums, encoding="utf-8")


def remove_copies(checkpoint: Path) -> None:
    """Keep one of several equal files."""
    known = set()
    for name in files_of(checkpoint):
        digest = sha256(checkpoint / name)
        if digest in known:
            (checkpoint / name).unlink()
        known.add(digest)


def _write_voices(work: Path, folder: Path) -> None:
    """A recording of each demo voice as `cosyvoice_triton.voice.book` reads it: NAME.wav and its transcript
    NAME.txt."""
    folder.mkdir(parents=True)
    sentences = (work / "sentences.txt").read_text(encoding="utf-8").splitlines()
    known = Counter(word for sentence in sentences for word in sentence.split())
    utterances = np.load(work / "utterances.npy")
    audio = np.load(work / "audio.npy", mmap_mode="r")
    starts = np.cumsum(utterances[:, 2]) - utterances[:, 2]
    for voice, name in enumerate(DEMO_VOICES):
        (index, text) = _recording(utterances, sentences, known, voice)
        begin, length = int(starts[index]) * TOKEN_SAMPLES, int(utterances[index, 2]) * TOKEN_SAMPLES
        soundfile.write(folder / f"{name}.wav", audio[begin : begin + length], SAMPLE_RATE)
        (folder / f"{name}.txt").write_text(text + "\n", encoding="utf-8")


def _recording(utterances: np.ndarray, sentences: list[str], known: Mapping[str, int], voice: int) -> tuple[int, str]:
    """Of the utterances of `voice` that are plain sentences of suitable length, the one whose words are all `known`
    best: an everyday one. If there is none, its first."""
    shortest, longest = (seconds * TOKEN_RATE for seconds in VOICE_SECONDS)
    members = [(index, sentences[row[0]], row[2]) for index, row in enumerate(utterances) if row[1] == voice]
    good = [
        (index, text)
        for index, text, tokens in members
        if shortest <= tokens <= longest
        and text.endswith(".")
        and text.replace(" ", "")[:-1].isalpha()
        and len(text.split()) >= VOICE_WORDS
        and text.startswith(("the ", "he ", "she ", "we ", "they ", "it "))
    ]
    index, text, *_ = max(good, key=lambda each: min(known[word] for word in each[1].split()), default=members[0])
    return index, text.capitalize()
