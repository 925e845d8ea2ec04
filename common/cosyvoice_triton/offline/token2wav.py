"""Speech tokens to audio files, whole or in chunks, in timed passes over the samples."""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.load.report import table
from cosyvoice_triton.load.samples import Sample
from cosyvoice_triton.offline.inputs import VoicePrompts, read_samples, with_tokens
from cosyvoice_triton.offline.pipeline import batches
from cosyvoice_triton.offline.rendering import OfflineToken2Wav, PromptedTokens, Streamed
from cosyvoice_triton.offline.stages import Stages
from cosyvoice_triton.offline.tool import Failure, show_failures, show_resynthesis
from cosyvoice_triton.orchestrator.chunking import HopRules
from cosyvoice_triton.voice.audio import save_audio

STAGES = ("voice", "token2wav")


def run(args: argparse.Namespace) -> int:
    """Return the exit code. Raises ValueError, RuntimeError or OSError if it cannot start."""
    samples = with_tokens(read_samples(args), args.tokens_path)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    streams = args.batch_size if args.streaming else 0
    token2wav = OfflineToken2Wav.load(args.model_dir, args.device, streams, args.enable_trt)
    voices = VoicePrompts(token2wav.stack, args.model_dir, args.device, args.enable_trt)
    voices.warm_up()
    rules = token2wav.rules(args.strategy) if args.streaming else None
    epochs = []
    with tqdm(total=args.warmup * len(samples), desc="token2wav", unit="sample") as progress:
        for _ in range(args.warmup):
            voices.clear()
            epochs.append(Epoch(voices, token2wav, rules, args.output_dir))
            for batch in batches(samples, args.batch_size):
                epochs[-1].render(batch)
                progress.update(len(batch))
    report(args, samples, token2wav, epochs)
    return 1 if epochs[-1].failures else 0


@dataclass
class Epoch:
    """One pass over the samples. rules: the hops of streams; None renders whole utterances."""

    voices: VoicePrompts
    token2wav: OfflineToken2Wav
    rules: HopRules | None
    output_dir: Path
    stages: Stages = field(default_factory=lambda: Stages(STAGES))
    audio_seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    forward_calls: int = 0
    chunks: int = 0
    first_chunks: list[float] = field(default_factory=list)  # seconds

    def render(self, samples: Sequence[Sample]) -> None:
        """Render a batch and write its files."""
        utterances: list[tuple[Sample, PromptedTokens]] = []
        for sample in samples:
            try:
                with self.stages.time("voice"):
                    utterances.append((sample, self.voices.utterance(sample)))
            except Exception as error:
                self.failures.append(Failure.of(sample, "voice", error))
        called = self.token2wav.calls
        with self.stages.time("token2wav"):
            rendered = self._rendered([utterance for _, utterance in utterances])
        self.forward_calls += self.token2wav.calls - called
        for (sample, _), audio in zip(utterances, rendered, strict=True):
            try:
                self._save(sample, audio)
            except Exception as error:
                self.failures.append(Failure.of(sample, "token2wav", error))

    def _rendered(self, utterances: Sequence[PromptedTokens]) -> Sequence[np.ndarray | Streamed | Exception]:
        if self.rules is None:
            return self.token2wav.whole(utterances) if utterances else []
        return self.token2wav.streamed(utterances, self.rules)

    def _save(self, sample: Sample, audio: np.ndarray | Streamed | Exception) -> None:
        if isinstance(audio, Exception):
            raise audio
        if isinstance(audio, Streamed):
            self.first_chunks.append(audio.first_chunk)
            self.chunks += len(audio.waveforms)
        whole = np.concatenate(audio.waveforms) if isinstance(audio, Streamed) else audio
        save_audio(self.output_dir / f"{sample.id}.wav", whole, SAMPLE_RATE)
        self.audio_seconds += len(whole) / SAMPLE_RATE

    def figures(self) -> dict[str, Any]:
        """Return the times of the stages, and what the chunks of streams cost."""
        total = sum(self.stages.seconds.values())
        return self.stages.figures(self.audio_seconds, total) | {
            "forward_calls": self.forward_calls,
            "chunks": self.chunks,
            "first_chunk_ms": 1e3 * statistics.median(self.first_chunks) if self.first_chunks else None,
        }


def report(
    args: argparse.Namespace, samples: Sequence[Sample], token2wav: OfflineToken2Wav, epochs: list[Epoch]
) -> None:
    """Print the figures and write them as JSON, `args.figures`."""
    last = epochs[-1]
    how = f"streamed ({args.strategy})" if args.streaming else "whole"
    print(f"{token2wav.name}, {how}, batches of {args.batch_size}: {last.audio_seconds:.1f} s of audio")
    figures = {
        "args": vars(args),
        "vocoder": token2wav.name,
        "samples": len(samples),
        "samples_that_say_their_recording": show_resynthesis(samples),
        "total_audio_duration_seconds": last.audio_seconds,
        **last.figures(),
        "passes": [epoch.figures() for epoch in epochs],
        "failures": [failure._asdict() for failure in last.failures],
    }
    path = args.output_dir / args.figures
    path.write_text(json.dumps(figures, indent=4, default=str) + "\n", encoding="utf-8")
    rows = [(stage, figures[f"{stage}_time_seconds"], figures[f"{stage}_rtf"]) for stage in (*STAGES, "pipeline")]
    print(table(("stage", "seconds", "RTF"), rows))
    if args.streaming:
        header = ("pass", "first chunk, median ms", "forward calls", "chunks")
        passes = [each.figures() for each in epochs]
        costs = [(n, each["first_chunk_ms"], each["forward_calls"], each["chunks"]) for n, each in enumerate(passes, 1)]
        print(table(header, costs))
        print(f"Total flow matching forward calls: {last.forward_calls}")
    print(f"Measurement epoch time taken: {sum(last.stages.seconds.values()):.4f} seconds")
    show_failures(last.failures, path.name)
