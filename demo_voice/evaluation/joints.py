"""Joints of streamed audio compared with the same mel rendered at once: as served, and as upstream joins chunks.

    python -m demo_voice.evaluation.joints --output out/joints

The LLM speaks every sentence, the voices taking turns, and the flows of both stacks render its tokens in the server's
chunks, all in this process. HiFT then renders these mels in one piece, and chunk by chunk in several ways. Measured are
the joints whose cross-fade is voiced throughout. Writes joints.md and joints.png.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import (
    EULER_STEPS,
    HOP_SAMPLES,
    OVERLAP_FRAMES,
    OVERLAP_SAMPLES,
    SAMPLE_RATE,
    TOKEN_MEL_RATIO,
)
from cosyvoice_triton.demo_checkpoint.checkpoint import STACKS
from cosyvoice_triton.llm.interface import LLMPrompt, Sampling
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.load.plot import figure, save
from cosyvoice_triton.networks.hift import HiFTGenerator, load_hift
from cosyvoice_triton.orchestrator.chunking import HopRules
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.flow.base import FlowOptions, StreamingFlow
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.memory_plan import UNPLANNED_VOICES
from cosyvoice_triton.token2wav.gpu.noise import source_noise
from cosyvoice_triton.token2wav.stream import Chunk, Stream
from cosyvoice_triton.token2wav.vocoder.hift_vocoder import StreamingVocoder
from cosyvoice_triton.token2wav.vocoder.overlap import falling_half
from cosyvoice_triton.voice.prompt import Prompt
from torch import Tensor
from tqdm import tqdm

from demo_voice.evaluation import HELD_OUT
from demo_voice.evaluation.drift import prompts, streamed
from demo_voice.evaluation.measures import sharpness, spectral_distance
from tests.parity.reference.vocoder import ReferenceVocoder, hamming_window

WHOLE, BEFORE, SERVED = "in one piece", "Hamming, scaled to 1", "Hann, phases carried (served)"
LLM_BATCH = 8
ENDS = ("beginning", "middle", "end")  # of a cross-fade


@dataclass(frozen=True)
class Spoken:
    """One utterance. audio: (N,) float32 by the way in which HiFT rendered its mels."""

    stack: str
    audio: dict[str, np.ndarray]
    joints: Sequence[int]  # first samples of voiced cross-fades


def generated(models: Path, turns: Sequence[tuple[str, Prompt]], sentences: Sequence[str]) -> list[np.ndarray]:
    """Speech tokens of each sentence, after the transcript and prompt of the same position."""
    from cosyvoice_triton.offline.transformers_lm import TransformersLM  # takes seconds to import

    directory = models / stacks.COSYVOICE2_LLM.directory
    lm = TransformersLM.load(directory, LLMTokenizer.from_dir(directory), LLM_BATCH, "cpu")
    said = zip(turns, sentences, strict=True)
    asked = [LLMPrompt(sentence, text, prompt.tokens.tolist()) for (text, prompt), sentence in said]
    answers = lm.generate(asked, Sampling(seed=0, ras_window=0))
    if errors := [answer for answer in answers if isinstance(answer, Exception)]:
        raise errors[0]
    return [answer.tokens for answer in answers if not isinstance(answer, Exception)]


def load_flow(models: Path, stack: Stack) -> StreamingFlow:
    options = FlowOptions(
        stack=stack,
        device="cpu",
        dtype=torch.float32,
        runtime="torch",
        steps=EULER_STEPS,
        limits=BatchLimits(max_streams=1, chunk_boundary=stack.chunk_boundary),
        prompt_cache_bytes=UNPLANNED_VOICES,
        contexts=1,
    )
    return resolve_name(stack.loader)(models / stack.checkpoint / stack.flow, options)


class Vocoders:
    """HiFT in all ways that are compared."""

    def __init__(self, hift: HiFTGenerator) -> None:
        self._hift = hift
        self._noise = source_noise(hift.config.harmonics + 1)
        self._served = StreamingVocoder(hift, self._noise, limits=BatchLimits(max_streams=1))
        falling = falling_half(OVERLAP_SAMPLES).double()
        hamming = hamming_window(OVERLAP_SAMPLES)
        halves = hamming[:OVERLAP_SAMPLES] + hamming[OVERLAP_SAMPLES:]
        self._windows = {
            "Hamming (upstream)": hamming,
            BEFORE: hamming / torch.cat([halves, halves]),
            "Hann": torch.cat([1 - falling, falling]),
        }

    @torch.inference_mode()
    def speak(self, stack: Stack, mels: Sequence[Tensor]) -> Spoken:
        """mels: (80, T) of each chunk."""
        whole = torch.cat(list(mels), dim=1)
        audio = {WHOLE: self._served.whole([whole])[0].numpy()}
        for name, window in self._windows.items():
            vocoder = ReferenceVocoder(self._hift, window, self._noise.read)
            audio[name] = _joined(vocoder.step(mel, mel is mels[-1]) for mel in mels)
        parts = self._as_served(mels)
        audio[SERVED] = _joined(parts)
        voiced = self._hift.f0(whole[None])[0] > self._hift.config.voiced_threshold
        joints = [
            joint
            for joint in accumulate(len(part) for part in parts[:-1])
            if voiced[(frame := joint // HOP_SAMPLES) : frame + OVERLAP_FRAMES].all()
            and joint + 2 * OVERLAP_SAMPLES < len(audio[WHOLE])
        ]
        return Spoken(stack.name, audio, joints)

    def _as_served(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """The audio (N,) of each chunk."""
        stream, parts = Stream(vocoder=self._served.open()), []
        for mel in mels:
            (audio,) = self._served.step([Chunk(stream, np.zeros(0, np.int64), mel is mels[-1], 0, 0, 0)], [mel])
            if isinstance(audio, Exception):
                raise audio
            parts.append(audio)
        self._served.close(stream.vocoder)
        return parts


def _joined(parts: Iterable[Tensor]) -> np.ndarray:
    return torch.cat(list(parts)).numpy()


def utterances(models: Path, voices: Sequence[str], sentences: Sequence[str]) -> Iterator[Spoken]:
    """All sentences by both stacks, which get the same tokens."""
    tokens: list[np.ndarray] = []
    for stack in STACKS:
        model_dir = models / stack.checkpoint
        of_voice = {voice: (text, prompt) for voice, text, prompt in prompts(models, stack)}
        turns = [of_voice[voice] for voice, _ in zip(cycle(voices), sentences, strict=False)]
        tokens = tokens or generated(models, turns, sentences)
        flow, rules = load_flow(models, stack), HopRules(boundary=stack.chunk_boundary)
        vocoders = Vocoders(load_hift(model_dir / stack.hift))
        for (_, prompt), ids in zip(turns, tqdm(tokens, desc=stack.name, unit="sentence"), strict=True):
            schedule, hops = rules.schedule(len(prompt.tokens)), []
            while hop := schedule.next_hop(len(ids), ended=True):
                hops.append(hop)
            mel = streamed(flow, prompt, ids, hops)
            yield vocoders.speak(stack, mel.split([TOKEN_MEL_RATIO * hop.length for hop in hops], dim=1))


def table(spoken: Sequence[Spoken]) -> str:
    """Figures as a Markdown table."""
    counts = {
        name: sum(len(each.joints) for each in spoken if each.stack == name)
        for name in [stack.name for stack in STACKS]
    }
    title = ", ".join(f"{count} voiced joints of the {name} stack" for name, count in counts.items())
    lines = [
        title,
        "",
        f"| HiFT | sharpness p90 | max | {' | '.join(f'dB, {end}' for end in ENDS)} |",
        "|---" * (3 + len(ENDS)) + "|",
    ]
    for name in spoken[0].audio:
        sharp = [
            sharpness(each.audio[name], at)
            for each in spoken
            for joint in each.joints
            for at in (joint, joint + OVERLAP_SAMPLES)
        ]
        distances = [
            np.mean([spectral_distance(each.audio[name], each.audio[WHOLE], at) for each, at in _points(spoken, part)])
            for part in range(len(ENDS))
        ]
        cells = [name, f"{np.percentile(sharp, 90):.2f}", f"{max(sharp):.2f}", *(f"{each:.2f}" for each in distances)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _points(spoken: Sequence[Spoken], part: int) -> Iterator[tuple[Spoken, int]]:
    """Every joint's sample at ENDS[part] of its cross-fade."""
    for each in spoken:
        yield from ((each, joint + part * OVERLAP_SAMPLES // 2) for joint in each.joints)


def draw(spoken: Sequence[Spoken], path: Path) -> None:
    """The cross-fade with the sharpest end of BEFORE: waveforms there, and differences from one piece."""
    each, end = max(_points(spoken, 2), key=lambda point: sharpness(point[0].audio[BEFORE], point[1]))
    joint = end - OVERLAP_SAMPLES
    shown = [BEFORE, SERVED]
    picture, axes = figure(2, len(shown), 13, 6.5)
    near = slice(end - SAMPLE_RATE // 100, end + SAMPLE_RATE // 100)
    wide = slice(joint - OVERLAP_SAMPLES // 2, joint + 2 * OVERLAP_SAMPLES)
    for column, name in enumerate(shown):
        for row, (part, what) in enumerate([(near, "waveform"), (wide, "difference from one piece")]):
            panel, ms = axes[row][column], (np.arange(part.start, part.stop) - joint) / SAMPLE_RATE * 1000
            if row == 0:
                panel.plot(ms, each.audio[WHOLE][part], color="0.6", linewidth=3, label=WHOLE)
                panel.plot(ms, each.audio[name][part], color="tab:blue", linewidth=1, label=name)
                panel.axvline(1000 * OVERLAP_SAMPLES / SAMPLE_RATE, color="black", linewidth=0.8, linestyle="--")
            else:
                panel.plot(ms, (each.audio[name] - each.audio[WHOLE])[part], color="tab:red", linewidth=0.7)
                panel.axvspan(0, 1000 * OVERLAP_SAMPLES / SAMPLE_RATE, color="0.92", label="cross-fade")
                panel.sharey(axes[row][0])
            panel.legend(loc="lower right", fontsize=8)
            panel.set(title=f"{name}: {what}", xlabel="ms from the joint")
    save(picture, path)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", type=Path, default=Path("models/demo"), help="as cosyvoice_triton.demo_checkpoint.make writes it"
    )
    parser.add_argument("--sentences", type=Path, default=HELD_OUT, help="one per line")
    parser.add_argument("--voices", nargs="+", default=("slt", "rms"), help="names in the folder voices of the models")
    parser.add_argument("--output", type=Path, default=Path("out/joints"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    torch.set_num_threads(1)
    try:
        spoken = list(utterances(args.models, args.voices, args.sentences.read_text(encoding="utf-8").splitlines()))
        if not any(each.joints for each in spoken):
            raise ValueError(f"{args.sentences}: no voiced joint; longer sentences have more chunks")
        args.output.mkdir(parents=True, exist_ok=True)
        text = table(spoken)
        (args.output / "joints.md").write_text(text, encoding="utf-8")
        draw(spoken, args.output / "joints.png")
    except (ValueError, RuntimeError, OSError) as error:
        print(f"joints: {error}", file=sys.stderr)
        return 1
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
