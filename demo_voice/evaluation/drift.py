"""Measure how streams of 30 s drift when the flow keeps less than all of their past.

    python -m demo_voice.evaluation.drift --models models/demo --output out/drift

The checkpoint's LLM makes the speech tokens of everyday sentences, one voice after another; the sentences of a stream
are rendered without a break. Every stream is rendered by the flow in this process with several lengths of memory and
with unlimited memory, then vocoded. Every 5 s are compared with unlimited memory (distance of the mels, loudness,
pitch), with the recording of the voice (x-vectors) and, tokenised again, with the tokens that it was made of.

A row "other noise" has unlimited memory and another initial noise of the flow: it shows how far two renderings of the
same tokens differ that are equally good. Writes drift.md, drift.json and drift.png.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.cli.arguments import positive_int
from cosyvoice_triton.config import ChunkStrategy, OrchestratorConfig
from cosyvoice_triton.constants import (
    CONTEXT_TOKENS,
    EULER_STEPS,
    MEL_BINS,
    MEL_RATE,
    PROMPT_SAMPLE_RATE,
    SAMPLE_RATE,
    TAIL_FRAMES,
    TOKEN_MEL_RATIO,
    TOKEN_RATE,
)
from cosyvoice_triton.demo_checkpoint.checkpoint import STACKS
from cosyvoice_triton.llm.interface import LLMPrompt, Sampling
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.load.plot import figure, save
from cosyvoice_triton.networks.flow.cache import KeyValues
from cosyvoice_triton.networks.flow.checkpoint import load_dit_flow, load_unet_flow
from cosyvoice_triton.networks.flow.config import DiTConfig
from cosyvoice_triton.networks.flow.dit import DiTFlow
from cosyvoice_triton.networks.flow.unet import UNetFlow
from cosyvoice_triton.orchestrator.chunking import Hop, HopRules
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.flow.base import StreamingFlow, Vocoder, VocoderOptions
from cosyvoice_triton.token2wav.flow.dit_flow import DiTStreaming
from cosyvoice_triton.token2wav.flow.prompt_caches import PromptCaches
from cosyvoice_triton.token2wav.flow.unet_flow import UNetStreaming
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.memory_plan import kept_per_frame
from cosyvoice_triton.token2wav.gpu.noise import FLOW_NOISE_FRAMES, NoiseTape, flow_noise
from cosyvoice_triton.token2wav.stream import VocoderState
from cosyvoice_triton.token2wav.vocoder import hift_vocoder as hift
from cosyvoice_triton.voice import audio
from cosyvoice_triton.voice.encoders import AudioTokenizer, ReferenceEncoder, SpeakerEncoder
from cosyvoice_triton.voice.prompt import Prompt
from torch import Tensor
from tqdm import tqdm

from demo_voice.evaluation import HELD_OUT, HUMAN, HUMAN_TEXT
from demo_voice.training.pitch import fundamental
from tests.parity.reference import dit_flow

SECONDS = 30
STRETCH = 5  # seconds that a figure is measured over
TAILS = (25, 50, 100, 200, 375, 750)  # mel frames
WINDOWS = (125, 250, 375)  # tokens
UPSTREAM_PROMPT_FRAMES = 100  # of the prompt, that upstream's cache keeps in long streams
DECIBEL = 20 / np.log(10)  # of a natural logarithm of magnitudes
LIMITS = BatchLimits(max_streams=1)
UNLIMITED, OTHER_NOISE = "unlimited", "unlimited, other noise"
STYLES: dict[str, Any] = {UNLIMITED: {"color": "black"}, OTHER_NOISE: {"color": "black", "linestyle": "--"}}

Network = DiTFlow | UNetFlow
Encode = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # see Encoders
Render = Callable[[Network, Prompt, np.ndarray, Sequence[Hop]], Tensor]


@dataclass(frozen=True)
class Speech:
    """A stream of several sentences, (N,) tokens."""

    prompt: Prompt
    tokens: np.ndarray


@dataclass(frozen=True)
class Memory:
    """How much of a stream its flow keeps. frames: mel frames of keys and values per stream, None if unlimited."""

    name: str
    render: Render
    frames: int | None = None


@dataclass(frozen=True)
class Drift:
    """Figures of all streams with one memory; lists are by stretch.

    mel: RMS difference of the mels to unlimited memory, dB. x_vector: cosine to the prompt's. loudness: dB above that
    of unlimited memory. pitch: percent above it, in frames that are voiced in both. tokens: share that the speech
    tokenizer finds again in the audio.
    """

    stack: str
    memory: str
    mib: float | None  # per stream, at the official sizes in float16
    keys: int | None  # that a chunk of 25 tokens attends to after a prompt of 5 s
    mel: list[float]
    x_vector: list[float]
    loudness: list[float]
    pitch: list[float]
    tokens: list[float]


# --- speech ------------------------------------------------------------------------------------------------------


def prompts(models: Path, stack: Stack) -> Iterator[tuple[str, str, Prompt]]:
    """Name, transcript and prompt of the registered voices and of a recording of a human."""
    encode = ReferenceEncoder(stack, models / stack.checkpoint)
    recordings = sorted((models / "voices").glob("*.wav"))
    texts = [path.with_suffix(".txt").read_text(encoding="utf-8").strip() for path in recordings]
    for path, text in zip([*recordings, HUMAN], [*texts, HUMAN_TEXT], strict=True):
        yield path.stem, text, encode(audio.load_audio(path, PROMPT_SAMPLE_RATE))


def speeches(models: Path, stack: Stack, sentences: Sequence[str], count: int) -> Iterator[Speech]:
    """`count` streams of at least `SECONDS` in each voice."""
    from cosyvoice_triton.offline.transformers_lm import TransformersLM  # takes seconds to import

    directory = models / stacks.DEFAULT.llm.directory
    tokenizer = LLMTokenizer.from_dir(directory)
    llm = TransformersLM.load(directory, tokenizer, batch_size=len(sentences), device="cpu")
    for voice, text, prompt in prompts(models, stack):
        asked = [LLMPrompt(sentence, text, prompt.tokens.tolist()) for sentence in sentences]
        generated = [each for each in llm.generate(asked, Sampling(seed=0)) if not isinstance(each, Exception)]
        if len(generated) < len(sentences):
            raise ValueError(f"the LLM made no tokens for {len(sentences) - len(generated)} sentences in voice {voice}")
        spoken = (each.tokens for each in generated)
        for _ in range(count):
            parts: list[np.ndarray] = []
            while sum(map(len, parts)) < SECONDS * TOKEN_RATE:
                if (following := next(spoken, None)) is None:
                    raise ValueError(f"the sentences do not fill {count} streams of {SECONDS} s: lower --streams")
                parts.append(following)
            yield Speech(prompt, np.concatenate(parts)[: SECONDS * TOKEN_RATE])


# --- rendering ---------------------------------------------------------------------------------------------------


def streamed(flow: StreamingFlow, prompt: Prompt, tokens: np.ndarray, hops: Sequence[Hop]) -> Tensor:
    """The mel (80, 2 N) of a stream."""
    stream, mels = flow.open(prompt, VocoderState(0)), []
    for hop in hops:
        part = tokens[0 if flow.cumulative else hop.offset : hop.end_of_context]
        mels += [mel.clone() for mel in flow.render([flow.chunk(stream, part, final=hop.final)])]
    flow.close(stream)
    return torch.cat(mels, dim=1)


def by_dit(
    network: Network,
    prompt: Prompt,
    tokens: np.ndarray,
    hops: Sequence[Hop],
    *,
    tail: int | None = None,
    context: int | None = None,
    noise: NoiseTape | None = None,
) -> Tensor:
    """As served. tail, context: None is unlimited, tail 0 as many frames as the prompt has."""
    assert isinstance(network, DiTFlow)
    flow = DiTStreaming(
        network,
        noise or flow_noise(),
        PromptCaches(1 << 40),
        limits=LIMITS,
        tail_frames=TOKEN_MEL_RATIO * len(tokens) if tail is None else tail or len(prompt.mel),
        context_tokens=context or len(tokens),
    )
    return streamed(flow, prompt, tokens, hops)


def by_upstream_dit(network: Network, prompt: Prompt, tokens: np.ndarray, hops: Sequence[Hop]) -> Tensor:
    """With upstream's rule (`by_upstreams_rule`), except for the noise, which serving reads by absolute frame."""
    assert isinstance(network, DiTFlow)
    noise, P = flow_noise(), len(prompt.mel)
    inputs = (torch.from_numpy(x)[None] for x in (prompt.tokens, prompt.mel, prompt.embedding))
    cache, mels = dit_flow.prefill(network, *inputs, noise=noise.read(0, P).T[None]), []
    for hop in hops:
        part = torch.from_numpy(tokens[hop.offset : hop.end_of_context])[None]
        frames = TOKEN_MEL_RATIO * hop.length
        of_chunk = noise.read(P + TOKEN_MEL_RATIO * hop.offset, frames).T[None]
        mel, cache = dit_flow.inference_chunk(network, part, cache, final=hop.final, noise=of_chunk)
        mels.append(mel[0])
        kept = by_upstreams_rule(cache.estimator.attention, frames, P)
        cache = replace(cache, estimator=replace(cache.estimator, attention=kept))
    return torch.cat(mels, dim=1)


def by_upstreams_rule(memory: KeyValues, new: int, prompt: int) -> KeyValues:
    """What is kept of a memory after a chunk of `new` frames, which are its last ones.

    They are put first, so that the prompt is last; kept are as many frames from the start as the prompt has, and the
    last UPSTREAM_PROMPT_FRAMES. (Step-Audio2's `forward_chunk` concatenates in this order, and its trim expects the
    prompt first.)
    """
    newest_first = KeyValues(memory.keys.roll(new, dims=-2), memory.values.roll(new, dims=-2))
    return dit_flow.trimmed(newest_first, prompt, UPSTREAM_PROMPT_FRAMES)


def by_unet(
    network: Network,
    prompt: Prompt,
    tokens: np.ndarray,
    hops: Sequence[Hop],
    *,
    context: int | None = None,
    noise: NoiseTape | None = None,
) -> Tensor:
    """As served. context: None is unlimited."""
    assert isinstance(network, UNetFlow)
    flow = UNetStreaming(network, noise or flow_noise(), limits=LIMITS, context_tokens=context or len(tokens))
    return streamed(flow, prompt, tokens, hops)


def other_noise() -> NoiseTape:
    return NoiseTape(torch.randn(FLOW_NOISE_FRAMES, MEL_BINS, generator=torch.Generator().manual_seed(1)))


def memories(stack: Stack) -> list[Memory]:
    """The first one is unlimited, which the others are compared with."""
    if stack.cumulative:
        return [
            Memory(UNLIMITED, by_unet),
            *(Memory(f"{tokens / TOKEN_RATE:g} s", partial(by_unet, context=tokens)) for tokens in WINDOWS),
            Memory(OTHER_NOISE, partial(by_unet, noise=other_noise())),
        ]
    served = partial(by_dit, context=CONTEXT_TOKENS)
    return [
        Memory(UNLIMITED, by_dit),
        *(Memory(f"{frames} frames", partial(served, tail=frames), frames) for frames in TAILS),
        Memory("as many as the prompt", partial(served, tail=0)),
        Memory("unlimited, encoder 15 s", served),
        Memory("upstream's rule", by_upstream_dit),
        Memory(OTHER_NOISE, partial(by_dit, noise=other_noise())),
    ]


# --- measuring ---------------------------------------------------------------------------------------------------


def stretches(values: np.ndarray, rate: int) -> list[np.ndarray]:
    """(..., N) -> the parts of `STRETCH` seconds, up to `SECONDS`."""
    return np.split(values[..., : SECONDS * rate], SECONDS // STRETCH, axis=-1)


def decibels(wave: np.ndarray) -> float:
    return float(10 * np.log10(np.square(wave).mean() + 1e-10))


class Encoders:
    """The networks that encode recordings, on stretches of 24 kHz audio."""

    def __init__(self, model_dir: Path):
        self._speaker, self._tokenizer = SpeakerEncoder(model_dir), AudioTokenizer(model_dir)

    def __call__(self, wave: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x-vectors (stretches, 192) of unit length; tokens (stretches, 125)."""
        recording = audio.resample(torch.from_numpy(wave), SAMPLE_RATE, PROMPT_SAMPLE_RATE).numpy()
        waves = stretches(recording, PROMPT_SAMPLE_RATE)
        found = np.stack(self._speaker(waves))
        return found / np.linalg.norm(found, axis=1, keepdims=True), np.stack(self._tokenizer(waves))


@dataclass(frozen=True)
class Rendered:
    """One stream with one memory."""

    speech: Speech
    mel: np.ndarray  # (80, T)
    wave: np.ndarray  # (N,)

    def compared(self, unlimited: "Rendered", encode: Encode) -> dict[str, list[float]]:
        """The lists of `Drift` that are measured by stretch."""
        mels = zip(*(stretches(each.mel, MEL_RATE) for each in (self, unlimited)), strict=True)
        waves = zip(*(stretches(each.wave, SAMPLE_RATE) for each in (self, unlimited)), strict=True)
        pitches = (fundamental(torch.from_numpy(each.wave)[None])[0].numpy() for each in (self, unlimited))
        ratios = []
        for ours, theirs in zip(*(stretches(each, MEL_RATE) for each in pitches), strict=True):
            both = (ours > 0) & (theirs > 0)
            ratios.append(100 * float(ours[both].mean() / theirs[both].mean() - 1) if both.any() else 0.0)
        vectors, tokens = encode(self.wave)
        voice = self.speech.prompt.embedding / np.linalg.norm(self.speech.prompt.embedding)
        return {
            "mel": [DECIBEL * float(np.sqrt(np.square(ours - theirs).mean())) for ours, theirs in mels],
            "x_vector": (vectors @ voice).tolist(),
            "loudness": [decibels(ours) - decibels(theirs) for ours, theirs in waves],
            "pitch": ratios,
            "tokens": (tokens == np.stack(stretches(self.speech.tokens, TOKEN_RATE))).mean(axis=1).tolist(),
        }


@torch.inference_mode()
def measured(stack: Stack, model_dir: Path, rules: HopRules, speech: Speech) -> dict[str, dict[str, list[float]]]:
    """The figures of one stream with each memory."""
    torch.set_num_threads(1)
    load = load_unet_flow if stack.cumulative else load_dit_flow
    network: Network = load(model_dir / stack.flow, "cpu", torch.float32)
    options = VocoderOptions(device="cpu", dtype=torch.float32, limits=LIMITS, graphs=False)
    vocoder: Vocoder = hift.load(model_dir / stack.hift, options)
    encoders, schedule = Encoders(model_dir), rules.schedule(len(speech.prompt.tokens))
    hops = list(iter(lambda: schedule.next_hop(len(speech.tokens), ended=True), None))
    found: dict[str, dict[str, list[float]]] = {}
    unlimited: Rendered | None = None
    for memory in memories(stack):
        mel = memory.render(network, speech.prompt, speech.tokens, hops)
        rendered = Rendered(speech, mel.numpy(), vocoder.whole([mel])[0].numpy())
        unlimited = unlimited or rendered
        found[memory.name] = rendered.compared(unlimited, encoders)
    return found


def drifts(stack: Stack, model_dir: Path, strategy: ChunkStrategy, of: Sequence[Speech]) -> list[Drift]:
    """The means over all streams, which are rendered in parallel, one on each core."""
    job = partial(measured, stack, model_dir, HopRules(strategy=strategy, boundary=stack.chunk_boundary))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        each = list(tqdm(pool.map(job, of), desc=stack.name, total=len(of), unit="stream"))
    rows = []
    for memory in memories(stack):
        figures = [found[memory.name] for found in each]
        means = {name: np.mean([one[name] for one in figures], axis=0).tolist() for name in figures[0]}
        frames = memory.frames
        size = None if frames is None else frames * kept_per_frame(DiTConfig(), EULER_STEPS, 2) / 2**20
        keys = None if frames is None else STRETCH * MEL_RATE + frames + TOKEN_MEL_RATIO * TOKEN_RATE
        rows.append(Drift(stack.name, memory.name, size, keys, **means))
    return rows


# --- report ------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Drift]) -> str:
    """The figures of one stack as a Markdown table: the mels of each stretch, x-vector and tokens of the first and the
    last one, loudness and pitch where they differ most."""
    spans = [f"{begin}–{begin + STRETCH} s" for begin in range(0, SECONDS, STRETCH)]
    columns = ["memory", "MiB per stream", "keys", *spans, "x-vector", "loudness", "pitch", "tokens"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = [row.memory, "" if row.mib is None else f"{row.mib:.1f}", "" if row.keys is None else str(row.keys)]
        cells += [f"{value:.2f}" for value in row.mel]
        cells += [f"{row.x_vector[0]:.3f} → {row.x_vector[-1]:.3f}", f"{max(row.loudness, key=abs):+.2f} dB"]
        cells += [f"{max(row.pitch, key=abs):+.1f} %", f"{row.tokens[0]:.1%} → {row.tokens[-1]:.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Drift], title: str, path: Path) -> None:
    names = list(dict.fromkeys(row.stack for row in rows))
    picture, axes = figure(len(names), 2, 13, 4.5 * len(names))
    picture.suptitle(title)
    times = np.arange(STRETCH / 2, SECONDS, STRETCH)
    for name, (left, right) in zip(names, axes, strict=True):
        for row in (row for row in rows if row.stack == name):
            for axis, values in ((left, row.mel), (right, row.x_vector)):
                axis.plot(times, values, **STYLES.get(row.memory, {"marker": "o"}), label=row.memory)
        left.set(title=f"{name}: mel, distance to unlimited memory", xlabel="s", ylabel="dB", ylim=(0, None))
        right.set(title=f"{name}: x-vector, cosine to the recording's", xlabel="s")
        left.legend(fontsize="small")
    save(picture, path)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", type=Path, default=Path("models/demo"), help="as cosyvoice_triton.demo_checkpoint.make writes it"
    )
    parser.add_argument("--sentences", type=Path, default=HELD_OUT, help="one per line")
    parser.add_argument(
        "--stacks", nargs="+", choices=[stack.name for stack in STACKS], default=[stack.name for stack in STACKS]
    )
    parser.add_argument("--streams", type=positive_int, default=3, help="of each voice (default 3)")
    parser.add_argument(
        "--strategy",
        choices=get_args(ChunkStrategy)[:2],
        default=OrchestratorConfig.dynamic_chunk_strategy,
        help="division into chunks (default exponential); with `equal` all are short",
    )
    parser.add_argument("--output", type=Path, default=Path("out/drift"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    rows: list[Drift] = []
    try:
        sentences = args.sentences.read_text(encoding="utf-8").splitlines()
        for name in args.stacks:
            stack = stacks.named(name)
            model_dir = args.models / stack.checkpoint
            of = list(speeches(args.models, stack, sentences, args.streams))
            rows += drifts(stack, model_dir, args.strategy, of)
        about = f"{len(of)} streams of {SECONDS} s, {args.strategy} hops, tail {TAIL_FRAMES} frames as served"
        text = "\n".join(f"{name}\n\n{table([row for row in rows if row.stack == name])}" for name in args.stacks)
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "drift.md").write_text(f"{about}\n\n{text}", encoding="utf-8")
        content = {"about": about, "rows": [asdict(row) for row in rows]}
        (args.output / "drift.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        draw(rows, about, args.output / "drift.png")
    except (ValueError, RuntimeError, OSError) as error:
        print(f"drift: {error}", file=sys.stderr)
        return 1
    print(f"{about}\n\n{text}\nwritten to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
