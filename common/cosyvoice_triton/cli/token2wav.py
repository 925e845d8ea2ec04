"""token2wav alone: speech tokens and a recording of the voice in, audio files and timings out.

    cosyvoice-triton token2wav --model-dir models/demo/CosyVoice2-0.5B
    cosyvoice-triton token2wav --tokens-path out/offline/samples.jsonl --batch-size 8 --warmup 3
    cosyvoice-triton token2wav --streaming --strategy exponential

Utterances are rendered whole in batches of --batch-size, or with --streaming in chunks as a streaming client gets them.

The speech tokens come from the data set's column target_audio_cosy2_tokens, or from the same field in the file
--tokens-path, which `cosyvoice-triton offline` writes as samples.jsonl. A sample without tokens resynthesizes its own
recording.

The folder gets <id>.wav and token2wav.json. The figures are those of the last of --warmup passes over the samples; each
pass encodes the voices again. Loading, the warm-up and writing files are not included.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from cosyvoice_triton import stacks
from cosyvoice_triton.arguments import command_parser, positive_int, reporting_errors
from cosyvoice_triton.config import OrchestratorConfig
from cosyvoice_triton.constants import FLOW_CHUNK_TOKENS
from cosyvoice_triton.errors import OverloadedError
from cosyvoice_triton.load.report import table
from cosyvoice_triton.load.samples import Sample
from cosyvoice_triton.monitoring.metrics import BATCHES
from cosyvoice_triton.offline.shared import (
    SampleRun,
    WholeToken2Wav,
    add_data_arguments,
    add_trt_argument,
    described,
    read_samples,
    recording_of,
    set_up,
    speaker_runtime,
    stack_of,
    token2wav_config,
)
from cosyvoice_triton.orchestrator.chunking import HopRules
from cosyvoice_triton.orchestrator.token2wav_port import Token2WavSequence
from cosyvoice_triton.speaker.engines import load_token2wav, port_of
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.voice.encoders import ReferenceEncoder
from cosyvoice_triton.voice.prompt import Prompt

STAGES = ("voice", "token2wav")
RETRY_SECONDS = 0.1  # until a stream that found no place asks again


# Of speech tokens (n,): chunks (N,) float32 at 24 kHz, and of a stream the seconds from its start to the first.
Render = Callable[[Prompt, np.ndarray], Awaitable[tuple[list[np.ndarray], float | None]]]


def add_token2wav_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the tools that render existing speech tokens."""
    parser.add_argument(
        "--model-dir",
        type=Path,
        default=Path("models/demo", stacks.DEFAULT.checkpoint),
        help="token2wav checkpoint of any stack (default: %(default)s)",
    )
    add_data_arguments(parser, "--huggingface-dataset-split")
    parser.add_argument("--tokens-path", type=Path, help="JSON lines of id and target_audio_cosy2_tokens")
    parser.add_argument("--output-dir", type=Path, default=Path("out/generated_wavs"), help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_trt_argument(parser)


def with_tokens(samples: Sequence[Sample], path: Path | None) -> list[Sample]:
    """Return the samples with the tokens of `path`: JSON lines of `id` and `target_audio_cosy2_tokens`."""
    if path is None:
        return list(samples)
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        tokens = {str(row["id"]): np.asarray(row["target_audio_cosy2_tokens"], np.int64) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"cannot read the tokens in {path}: {type(error).__name__} {error}; "
            "`cosyvoice-triton offline` writes such a file, samples.jsonl"
        ) from None
    if missing := [sample.id for sample in samples if sample.id not in tokens]:
        raise ValueError(f"{path} has no tokens for {len(missing)} sample(s), the first is {missing[0]!r}")
    return [replace(sample, target_audio_cosy2_tokens=tokens[sample.id]) for sample in samples]


def run(args: argparse.Namespace) -> int:
    """Return the exit code. Raise ValueError, RuntimeError or OSError if it cannot start."""
    set_up()
    samples = with_tokens(read_samples(args), args.tokens_path)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    stack = stack_of(args.model_dir)
    with ExitStack() as closing:
        render, calls = renderer(args, stack, closing)
        encoder = ReferenceEncoder(stack, args.model_dir, args.device, speaker_runtime(args))
        epochs = asyncio.run(passes(args, samples, encoder, render, calls))
    report(args, samples, described(stack, args.model_dir), epochs)
    return 1 if epochs[-1].failures else 0


def renderer(args: argparse.Namespace, stack: Stack, closing: ExitStack) -> tuple[Render, Callable[[], int]]:
    """Load token2wav; return what renders an utterance, and what counts the forward calls of the flow."""
    if not args.streaming:
        # Without CUDA graphs: start-up is fast, and most of a GPU's memory stays free.
        whole = WholeToken2Wav(stack, token2wav_config(args, args.model_dir, "torch", 1), args.batch_size)
        closing.callback(whole.close)

        async def rendered(prompt: Prompt, tokens: np.ndarray) -> tuple[list[np.ndarray], None]:
            return [await whole.offline(prompt, tokens.tolist())], None

        return rendered, lambda: whole.calls
    service = load_token2wav(stack, token2wav_config(args, args.model_dir, "auto", args.batch_size))
    closing.callback(service.close)
    # Hops of 25 tokens at first, as in upstream's streaming test, and the server's longest hop.
    rules = HopRules(
        strategy=args.strategy,
        first_hop=FLOW_CHUNK_TOKENS,
        max_hop=OrchestratorConfig.max_hop_tokens,
        boundary=stack.chunk_boundary,
    )
    port = port_of(service, stack)

    async def streamed(prompt: Prompt, tokens: np.ndarray) -> tuple[list[np.ndarray], float]:
        if not len(tokens):
            raise ValueError("there are no speech tokens")
        stream, schedule = port.open(), rules.schedule(len(prompt.tokens))
        await admitted(stream)
        chunks, begun, first = list[np.ndarray](), time.perf_counter(), 0.0
        try:
            await stream.start(prompt, None)
            while (hop := schedule.next_hop(len(tokens), ended=True)) is not None:
                chunks.append(await stream.render(tokens.tolist(), hop))
                first = first or time.perf_counter() - begun
        finally:
            await stream.abort()
        return chunks, first

    return streamed, lambda: int(service.stats()[BATCHES])


async def admitted(stream: Token2WavSequence) -> None:
    """Reserve a place, waiting for one as long as it takes: there are no listeners who would hear a gap."""
    while True:
        try:
            return await stream.reserve()
        except OverloadedError:
            await asyncio.sleep(RETRY_SECONDS)


async def passes(
    args: argparse.Namespace,
    samples: Sequence[Sample],
    encoder: ReferenceEncoder,
    render: Render,
    calls: Callable[[], int],
) -> "list[Epoch]":
    epochs = []
    with tqdm(total=args.warmup * len(samples), desc="token2wav", unit="sample") as progress:
        for _ in range(args.warmup):
            encoder.clear()
            epochs.append(epoch := Epoch(args.output_dir))
            called = calls()
            for begin in range(0, len(samples), args.batch_size):
                batch = samples[begin : begin + args.batch_size]
                await asyncio.gather(*(epoch.speak(sample, encoder, render) for sample in batch))
                progress.update(len(batch))
            epoch.forward_calls = calls() - called
    return epochs


class Epoch(SampleRun):
    """One pass over the samples, in which each voice is encoded once."""

    def __init__(self, output_dir: Path) -> None:
        super().__init__(STAGES)
        self.output_dir = output_dir
        self.forward_calls = self.chunks = 0
        self.first_chunks: list[float] = []  # seconds

    async def speak(self, sample: Sample, encoder: ReferenceEncoder, render: Render) -> None:
        """Write the sample's file, or record why there is none."""
        with self.sample(sample) as enter:
            enter("voice")
            prompt = encoder(recording_of(sample))
            await asyncio.sleep(0)  # the voices of the whole batch come first
            enter("token2wav")
            tokens = sample.target_audio_cosy2_tokens
            chunks, first = await render(prompt, prompt.tokens if tokens is None else tokens)
            enter("")
            self.save(self.output_dir / f"{sample.id}.wav", np.concatenate(chunks))
            if first is not None:
                self.first_chunks.append(first)
                self.chunks += len(chunks)

    def figures(self, total: float | None = None) -> dict[str, Any]:
        """Return the times of the stages, which follow one another, and what the chunks of streams cost. Without
        `total` the pipeline's are all but the time that writing files takes."""
        return {
            **super().figures(sum(self.seconds.values()) if total is None else total),
            "forward_calls": self.forward_calls,
            "chunks": self.chunks,
            "first_chunk_ms": 1e3 * statistics.median(self.first_chunks) if self.first_chunks else None,
        }


def report(args: argparse.Namespace, samples: Sequence[Sample], vocoder: str, epochs: list[Epoch]) -> None:
    """Print the figures and write them as JSON, `args.figures`."""
    last = epochs[-1]
    how = f"streamed ({args.strategy})" if args.streaming else "whole"
    print(f"{vocoder}, {how}, batches of {args.batch_size}: {last.audio_seconds:.1f} s of audio")
    if without := sum(sample.target_audio_cosy2_tokens is None for sample in samples):
        print(f"{without} of {len(samples)} samples have no tokens and resynthesize their recordings")
    passes = [epoch.figures() for epoch in epochs]
    figures = last.report(
        args.output_dir / args.figures,
        args=vars(args),
        vocoder=vocoder,
        samples=len(samples),
        samples_that_say_their_recording=without,
        total_audio_duration_seconds=last.audio_seconds,
        passes=passes,
    )
    if args.streaming:
        header = ("pass", "first chunk, median ms", "forward calls", "chunks")
        keys = ("first_chunk_ms", "forward_calls", "chunks")
        print(table(header, [(n, *(each[key] for key in keys)) for n, each in enumerate(passes, 1)]))
        print(f"Total flow matching forward calls: {last.forward_calls}")
    print(f"Measurement epoch time taken: {figures['pipeline_time_seconds']:.4f} seconds")


@reporting_errors()
def main(argv: Sequence[str] | None = None) -> int:
    return run(parse_args(argv))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    add_token2wav_arguments(parser)
    parser.add_argument(
        "--batch-size", type=positive_int, default=4, help="utterances per batch (default: %(default)s)"
    )
    parser.add_argument("--warmup", type=positive_int, default=1, help="passes, the last of which is measured")
    parser.add_argument("--streaming", action="store_true", help="render in chunks instead of whole utterances")
    parser.add_argument("--strategy", choices=("equal", "exponential"), default="exponential", help="for --streaming")
    parser.set_defaults(figures="token2wav.json")
    return parser.parse_args(argv)
