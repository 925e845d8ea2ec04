"""Speech tokens to audio files, in timed passes over the samples."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.load.report import table
from cosyvoice_triton.load.samples import Sample
from cosyvoice_triton.offline.inputs import VoicePrompts, read_samples, with_tokens
from cosyvoice_triton.offline.pipeline import batches
from cosyvoice_triton.offline.rendering import OfflineToken2Wav, PromptedTokens
from cosyvoice_triton.offline.stages import Stages
from cosyvoice_triton.offline.tool import Failure, show_failures, show_resynthesis
from cosyvoice_triton.orchestrator.chunking import HopRules
from cosyvoice_triton.voice.audio import save_audio

STAGES = ("voice", "token2wav")


def run(args: argparse.Namespace) -> int:
    """The exit code. Raises ValueError, RuntimeError or OSError if it cannot start."""
    samples = with_tokens(read_samples(args), args.tokens_path)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    streams = args.batch_size if args.streaming else 0
    token2wav = OfflineToken2Wav.load(args.model_dir, args.device, streams, args.enable_trt)
    voices = VoicePrompts(token2wav.stack, args.model_dir, args.device, args.enable_trt)
    voices.warm_up()
    with tqdm(total=args.warmup * len(samples), desc="token2wav", unit="sample") as progress:
        for _ in range(args.warmup):
            voices.clear()
            epoch = Epoch(
                voices, token2wav, token2wav.rules(args.strategy) if args.streaming else None, args.output_dir
            )
            for batch in batches(samples, args.batch_size):
                epoch.render(batch)
                progress.update(len(batch))
    report(args, samples, token2wav, epoch)
    return 1 if epoch.failures else 0


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

    def render(self, samples: Sequence[Sample]) -> None:
        """Render a batch and write its files."""
        utterances: list[tuple[Sample, PromptedTokens]] = []
        for sample in samples:
            try:
                with self.stages.time("voice"):
                    utterances.append((sample, self.voices.utterance(sample)))
            except Exception as error:
                self.failures.append(Failure.of(sample, "voice", error))
        with self.stages.time("token2wav"):
            rendered = self._rendered([utterance for _, utterance in utterances])
        for (sample, _), audio in zip(utterances, rendered, strict=True):
            try:
                if isinstance(audio, Exception):
                    raise audio
                save_audio(self.output_dir / f"{sample.id}.wav", audio, SAMPLE_RATE)
                self.audio_seconds += len(audio) / SAMPLE_RATE
            except Exception as error:
                self.failures.append(Failure.of(sample, "token2wav", error))

    def _rendered(self, utterances: Sequence[PromptedTokens]) -> list[np.ndarray | Exception]:
        if self.rules is None:
            return self.token2wav.whole(utterances) if utterances else []
        streamed = self.token2wav.streamed(utterances, self.rules)
        return [each if isinstance(each, Exception) else np.concatenate(each.waveforms) for each in streamed]


def report(args: argparse.Namespace, samples: Sequence[Sample], token2wav: OfflineToken2Wav, epoch: Epoch) -> None:
    """Print the figures and write them as JSON."""
    total = sum(epoch.stages.seconds.values())
    how = f"streamed ({args.strategy})" if args.streaming else "whole"
    print(f"{token2wav.name}, {how}, batches of {args.batch_size}: {epoch.audio_seconds:.1f} s of audio")
    figures = {
        "args": vars(args),
        "vocoder": token2wav.name,
        "samples": len(samples),
        "samples_that_say_their_recording": show_resynthesis(samples),
        "total_audio_duration_seconds": epoch.audio_seconds,
        **epoch.stages.figures(epoch.audio_seconds, total),
        "failures": [failure._asdict() for failure in epoch.failures],
    }
    path = args.output_dir / "token2wav.json"
    path.write_text(json.dumps(figures, indent=4, default=str) + "\n", encoding="utf-8")
    rows = [(stage, figures[f"{stage}_time_seconds"], figures[f"{stage}_rtf"]) for stage in (*STAGES, "pipeline")]
    print(table(("stage", "seconds", "RTF"), rows))
    print(f"Measurement epoch time taken: {total:.4f} seconds")
    show_failures(epoch.failures, path.name)
