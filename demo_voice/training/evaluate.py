"""Evaluate a checkpoint without LLM and server: word errors and joints of vocoder and flows.

    python -m demo_voice.training.evaluate out/voice/checkpoint --flite DIR

flite synthesises every sentence in the demo's two voices. These recordings go through HiFT alone (copy synthesis), and
their speech tokens through each stack's flow and HiFT, whole and in the server's chunks, with a prompt in the same
voice. Writes OUTPUT/report.md and every waveform.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.config import OrchestratorConfig
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.demo_checkpoint.checkpoint import STACKS
from cosyvoice_triton.offline.rendering import OfflineToken2Wav
from cosyvoice_triton.orchestrator.chunking import HopRules
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.voice.audio import save_audio
from cosyvoice_triton.voice.encoders import AudioTokenizer, ReferenceEncoder
from cosyvoice_triton.voice.prompt import Prompt
from tqdm import tqdm

from demo_voice.evaluation import HELD_OUT
from demo_voice.evaluation.measures import figures, recognise
from demo_voice.evaluation.report import joints_cell
from demo_voice.evaluation.takes import Series, Take, copy_synthesis
from demo_voice.training.dataset import INT16_SCALE
from demo_voice.training.flite import VOICES, Flite

SPEAKERS = 2  # the demo's voices, the first of flite.VOICES
PROMPT_TEXT = "this is how i sound when somebody asks me to read a sentence or two."


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    torch.set_num_threads(1)
    sentences = args.sentences.read_text(encoding="utf-8").splitlines()[: args.count]
    flite = Flite(args.flite)
    teachers = [synthesized_takes(flite, voice, sentences) for voice in range(SPEAKERS)]
    series = [
        *teachers,
        *(copy_synthesis(args.checkpoint / stacks.UNET.checkpoint, teacher, "") for teacher in teachers),
    ]
    for stack in STACKS:
        directory = args.checkpoint / stack.checkpoint
        encode = ReferenceEncoder(stack, directory)
        for voice, teacher in enumerate(teachers):
            prompt = encode(synthesized(flite, PROMPT_TEXT, voice))
            series += from_tokens(directory, teacher, prompt, stack)
    for each in series:
        save(each, args.output / each.name)
    (args.output / "report.md").write_text(text := report(series, teachers), encoding="utf-8")
    print(text)
    return 0


def synthesized(flite: Flite, text: str, voice: int) -> np.ndarray:
    """flite's 16 kHz wave (N,) float32."""
    samples, _ = flite.synthesize(text.lower(), voice)
    return (samples * INT16_SCALE).astype(np.float32)


def synthesized_takes(flite: Flite, voice: int, sentences: Sequence[str]) -> Series:
    """The sentences in one of flite's voices."""
    takes = [Take(text, synthesized(flite, text, voice), PROMPT_SAMPLE_RATE) for text in sentences]
    return Series("teacher", "", VOICES[voice], takes)


def from_tokens(model_dir: Path, teacher: Series, prompt: Prompt, stack: Stack) -> list[Series]:
    """The teacher's speech tokens through flow and HiFT, whole and in chunks."""
    tokenizer, token2wav = AudioTokenizer(model_dir), OfflineToken2Wav.load(model_dir, "cpu", streams=1)
    rules = HopRules(
        first_hop=OrchestratorConfig.first_hop_tokens,
        max_hop=OrchestratorConfig.max_hop_tokens,
        boundary=stack.chunk_boundary,
    )
    whole, streamed = [], []
    for take in tqdm(teacher.takes, desc=f"{stack.name}, {teacher.voice}", unit="sentence"):
        utterance = (prompt, tokenizer([take.waveform])[0])
        (at_once,), (in_chunks,) = token2wav.whole([utterance]), token2wav.streamed([utterance], rules)
        if isinstance(at_once, Exception):
            raise at_once
        if isinstance(in_chunks, Exception):
            raise in_chunks
        whole.append(Take(take.text, at_once))
        joints = tuple(accumulate(len(waveform) for waveform in in_chunks.waveforms))[:-1]
        streamed.append(Take(take.text, np.concatenate(in_chunks.waveforms), joints=joints))
    return [
        Series("tokens to audio", stack.name, teacher.voice, whole),
        Series("tokens to audio, streamed", stack.name, teacher.voice, streamed),
    ]


def report(series: Sequence[Series], teachers: Sequence[Series]) -> str:
    """The figures as a Markdown table."""
    of_voice = {teacher.voice: teacher for teacher in teachers}
    lines = ["| audio | stack | voice | WER | joints above the usual step |", "|---|---|---|---|---|"]
    for each, recognised in zip(series, recognise(series), strict=True):
        found = figures(each, recognised, of_voice[each.voice])
        clicks = joints_cell(found.get("joints"))
        lines.append(f"| {each.system} | {each.stack} | {each.voice} | {found['wer']:.1%} | {clicks} |")
    return "\n".join(lines) + "\n"


def save(series: Series, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, take in enumerate(series.takes):
        save_audio(folder / f"{number:02d}.wav", take.waveform, take.rate)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="in the official layout, as stage `export` writes it")
    parser.add_argument("--flite", type=Path, required=True, metavar="DIR", help="where libflite1 was unpacked")
    parser.add_argument("--sentences", type=Path, default=HELD_OUT, help="one per line")
    parser.add_argument("--count", type=int, help="use the first COUNT sentences only")
    parser.add_argument("--output", type=Path, default=Path("out/voice/sound"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
