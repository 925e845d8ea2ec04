"""Speed of token2wav's engine and scheduler, without Triton, LLM or network."""

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cosyvoice_triton import stacks
from cosyvoice_triton.arguments import command_parser
from cosyvoice_triton.bench import FULL_SIZE
from cosyvoice_triton.bench.token2wav_load import Piece, line, run_load
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, MEL_BINS, SPEAKER_DIM, SPEECH_VOCAB, TOKEN_RATE
from cosyvoice_triton.load.host import host_ms
from cosyvoice_triton.orchestrator.chunking import HopRules
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.precision import Precision
from cosyvoice_triton.token2wav.stream import Stream
from cosyvoice_triton.voice.prompt import Prompt

DESCRIPTION = """\
Time token2wav's engine and scheduler.

  cosyvoice-triton bench token2wav --stack dit --models models/official

Prompts are 5 s, utterances 8.5 s, hops 15, 25, 50, 100 tokens, the first one as long as the stack's boundary demands.
In the load tests utterances start at random times within a window, their tokens arrive at twice real time, and a chunk
is requested when its tokens and the previous chunk have arrived. Latency is from that moment to audio on the host; a
gap is an underrun of a player that starts 250 ms after the first audio. "Listeners" are concurrent streams in real
time. Voices are warm: their prompt caches exist already. "Host" is a fixed loop of Python on this machine's CPU, by
which runs on several machines can be compared.
"""
PROMPT_TOKENS, UTTERANCE_TOKENS = 125, 212
HOPS = (15, 25, 50, 100)
VOICES = 32
UTTERANCE_SECONDS = UTTERANCE_TOKENS / TOKEN_RATE
ROUNDS = 1.5  # duration of the load, in lengths of an utterance
CPU_LISTENERS = (1, 2, 3, 4, 6, 8)
LISTENERS = {  # at the same time, of the loads on a GPU
    stacks.DIT: (64, 128, 256, 320, 352, 384),
    stacks.UNET: (32, 64, 80, 96),
    stacks.COSYVOICE3: (64, 128, 192, 256),
}
PROMPT_CACHES = 32 << 30  # bytes: the voices of a load are all kept


def voice(seed: int) -> Prompt:
    rng = np.random.default_rng(seed)
    mel = (rng.standard_normal((2 * PROMPT_TOKENS, MEL_BINS)) - 6).astype(np.float32)
    embedding = rng.standard_normal(SPEAKER_DIM).astype(np.float32)
    return Prompt(rng.integers(0, SPEECH_VOCAB, PROMPT_TOKENS), mel, embedding, text="")


def hops_of(stack: Stack) -> tuple[int, ...]:
    """Return HOPS with the first one as the stack's orchestrator makes it after a prompt of PROMPT_TOKENS."""
    rules = HopRules(first_hop=HOPS[0], max_hop=HOPS[-1], boundary=stack.chunk_boundary)
    return rules.first_length(PROMPT_TOKENS), *HOPS[1:]


def utterance(seed: int, hops: Sequence[int], cumulative: bool) -> list[Piece]:
    """Return random tokens cut into the hops; the last has the rest. `cumulative`: with all tokens before them."""
    tokens = np.random.default_rng(seed).integers(0, SPEECH_VOCAB, UTTERANCE_TOKENS)
    cuts = [0, *(cut for cut in itertools.accumulate(hops) if cut < UTTERANCE_TOKENS)]
    begins = [0 if cumulative else cut for cut in cuts]
    chunks = [
        Piece(tokens[begin : end + LOOKAHEAD_TOKENS], final=False)
        for begin, end in zip(begins[:-1], cuts[1:], strict=True)
    ]
    return [*chunks, Piece(tokens[begins[-1] :], final=True)]


@dataclass
class Subject:
    """What is timed: the engine, with its chunks' lengths.

    hops: tokens of each chunk but the last. cumulative: whether a chunk carries all tokens of its stream so far.
    """

    engine: Token2Wav
    hops: tuple[int, ...]
    cumulative: bool
    device: torch.device

    @classmethod
    def build(cls, stack: Stack, models: Path, device: str, max_streams: int) -> "Subject":
        engine = Token2Wav.load(
            stack,
            models / stack.checkpoint,
            device=device,
            limits=BatchLimits(max_streams=max_streams, chunk_boundary=stack.chunk_boundary),
            precision=Precision.named("auto", "auto", device),
            plan=lambda _: PROMPT_CACHES,
        )
        return cls(engine, hops_of(stack), stack.cumulative, torch.device(device))

    def utterance(self, seed: int) -> list[Piece]:
        return utterance(seed, self.hops, self.cumulative)

    def step(self, batch: list[tuple[Stream, Piece]]) -> None:
        """Render a chunk of each stream."""
        engine = self.engine
        engine.step([engine.chunk(stream, piece.tokens, final=piece.final) for stream, piece in batch])

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the wall time of `work`, including the GPU's."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun


def first_chunk(subject: Subject) -> float:
    """Return the median seconds of a first chunk of one stream."""
    times = []
    for seed in range(16):
        stream, chunks = subject.engine.open(voice(seed % VOICES)), subject.utterance(seed)
        times.append(subject.seconds(partial(subject.step, [(stream, chunks[0])])))
        subject.engine.close(stream)
    return statistics.median(times[4:])


def loaded(subject: Subject, listeners: int) -> dict[str, float]:
    """Return the figures of a load in which about this many are heard at any moment, and print them."""
    utterances, voices = int(ROUNDS * listeners), [voice(seed) for seed in range(VOICES)]
    found = run_load(
        subject.engine,
        [subject.utterance(seed) for seed in range(utterances)].__getitem__,  # made before timing
        lambda seed: voices[seed % VOICES],
        hops=subject.hops,
        tokens=UTTERANCE_TOKENS,
        utterances=utterances,
        window=ROUNDS * UTTERANCE_SECONDS,
    )
    print(f"  {listeners} listeners: {line(found)}", flush=True)
    return found


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(DESCRIPTION)
    parser.add_argument("--stack", choices=stacks.names(), default=stacks.DEFAULT.name, help=stacks.summaries())
    parser.add_argument("--models", type=Path, required=True, help=f"checkpoints; {FULL_SIZE}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("out/bench"), help="OUTPUT.json is written")
    parser.add_argument("--max-streams", type=int, default=400)
    parser.add_argument(
        "--listeners", type=int, nargs="+", help="measure nothing but loads of this many, such as 256 512 1024"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    stack = stacks.named(args.stack)
    weights = f"checkpoint {args.models}"
    gpu = torch.cuda.get_device_name() if args.device.startswith("cuda") else "no GPU"
    host = host_ms()
    print(
        f"{args.stack} stack, {weights}, {args.device} ({gpu}), torch {torch.__version__}, host {host:.1f} ms",
        flush=True,
    )
    subject = Subject.build(stack, args.models, args.device, args.max_streams)
    result: dict[str, Any] = {"stack": args.stack, "weights": weights, "device": gpu, "torch": torch.__version__}
    result |= {"machine": platform.processor() or platform.machine(), "host_ms": host}
    result |= {"hops": subject.hops, "prompt_tokens": PROMPT_TOKENS}
    if args.listeners:
        for listeners in args.listeners:
            loaded(subject, listeners)
        return 0
    subject.engine.warm_up()
    result["first_chunk_ms"] = 1e3 * first_chunk(subject)
    print(f"first chunk of one stream: {result['first_chunk_ms']:.1f} ms", flush=True)
    for listeners in CPU_LISTENERS if subject.device.type == "cpu" else LISTENERS[stack]:
        result.setdefault("loads", []).append({"listeners": listeners, **loaded(subject, listeners)})
    most = [each["listeners"] for each in result["loads"] if each["share_without_gap"] == 1]
    result["listeners_without_gap"] = max(most, default=0)
    print(f"most listeners without a gap, of those tried: {result['listeners_without_gap']}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {args.output.with_suffix('.json')}")
    return 0
