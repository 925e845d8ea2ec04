"""Speech tokens rendered in chunks: the cost, and how the audio differs from offline rendering."""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from cosyvoice_triton.config import ChunkStrategy
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.load.report import table
from cosyvoice_triton.load.samples import Sample
from cosyvoice_triton.offline.compare import Difference, compare
from cosyvoice_triton.offline.inputs import VoicePrompts, read_samples, with_tokens
from cosyvoice_triton.offline.pipeline import batches
from cosyvoice_triton.offline.rendering import OfflineToken2Wav, PromptedTokens, Streamed
from cosyvoice_triton.offline.tool import Failure, show_failures, show_resynthesis
from cosyvoice_triton.voice.audio import save_audio


class Pass(NamedTuple):
    """All samples streamed once. seconds: voices and audio only; first_chunks: seconds, sorted."""

    seconds: float
    audio_seconds: float
    forward_calls: int
    chunks: int
    first_chunks: list[float]

    def figures(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "rtf": self.seconds / self.audio_seconds if self.audio_seconds else None,
            "first_chunk_ms": 1e3 * statistics.median(self.first_chunks) if self.first_chunks else None,
            "forward_calls": self.forward_calls,
            "chunks": self.chunks,
        }


@dataclass
class Study:
    """The samples streamed through token2wav and compared with offline rendering."""

    samples: Sequence[Sample]
    voices: VoicePrompts
    token2wav: OfflineToken2Wav
    strategy: ChunkStrategy
    batch_size: int
    output_dir: Path
    failures: dict[str, Failure] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)

    def stream(self, progress: "tqdm[Any]", compared: bool) -> Pass:
        """One pass. compared: write the audio and compare it with offline rendering."""
        seconds, calls, first_chunks, chunks, samples = 0.0, 0, [], 0, 0
        rules = self.token2wav.rules(self.strategy)
        for batch in batches(self.samples, self.batch_size):
            begun, called = time.perf_counter(), self.token2wav.calls
            utterances = self._utterances(batch)
            results = self.token2wav.streamed([utterance for _, utterance in utterances], rules)
            seconds += time.perf_counter() - begun
            calls += self.token2wav.calls - called
            for (sample, utterance), result in zip(utterances, results, strict=True):
                if isinstance(result, Exception):
                    self._fail(sample, "streaming", result)
                    continue
                first_chunks.append(result.first_chunk)
                chunks += len(result.waveforms)
                samples += sum(map(len, result.waveforms))
                if compared:
                    self._compare(sample, utterance, result)
            progress.update(len(batch))
        return Pass(seconds, samples / SAMPLE_RATE, calls, chunks, sorted(first_chunks))

    def _utterances(self, samples: Sequence[Sample]) -> list[tuple[Sample, PromptedTokens]]:
        utterances = []
        for sample in samples:
            try:
                utterances.append((sample, self.voices.utterance(sample)))
            except Exception as error:
                self._fail(sample, "voice", error)
        return utterances

    def _compare(self, sample: Sample, utterance: PromptedTokens, streamed: Streamed) -> None:
        (offline,) = self.token2wav.whole([utterance])
        try:
            if isinstance(offline, Exception):
                raise offline
            difference = compare(sample.id, offline, streamed.waveforms)
            save_audio(self.output_dir / f"{sample.id}.wav", np.concatenate(streamed.waveforms), SAMPLE_RATE)
            save_audio(self.output_dir / "offline" / f"{sample.id}.wav", offline, SAMPLE_RATE)
        except Exception as error:
            self._fail(sample, "comparison", error)
            return
        self.differences.append(difference)

    def _fail(self, sample: Sample, stage: str, error: Exception) -> None:
        self.failures.setdefault(sample.id, Failure.of(sample, stage, error))


def run(args: argparse.Namespace) -> int:
    """The exit code. Raises ValueError, RuntimeError or OSError if it cannot start."""
    samples = with_tokens(read_samples(args), args.tokens_path)
    (args.output_dir / "offline").mkdir(parents=True, exist_ok=True)
    token2wav = OfflineToken2Wav.load(args.model_dir, args.device, args.batch_size, args.enable_trt)
    voices = VoicePrompts(token2wav.stack, args.model_dir, args.device, args.enable_trt)
    study = Study(samples, voices, token2wav, args.strategy, args.batch_size, args.output_dir)
    voices.warm_up()
    with tqdm(total=2 * len(samples), desc=f"streaming, {args.strategy}", unit="sample") as progress:
        new = study.stream(progress, compared=False)
        known = study.stream(progress, compared=True)
    report(args, study, new, known)
    return 1 if study.failures else 0


def report(args: argparse.Namespace, study: Study, new: Pass, known: Pass) -> None:
    """Prints the figures and writes them as JSON."""
    name = args.output_dir / f"streaming-{args.strategy}"
    size = f"batches of {args.batch_size}"
    print(f"{study.token2wav.name}, {args.strategy}, {size}: {known.audio_seconds:.1f} s of audio")
    figures = {
        "args": vars(args),
        "vocoder": study.token2wav.name,
        "samples": len(study.samples),
        "samples_that_say_their_recording": show_resynthesis(study.samples),
        "total_audio_duration_seconds": known.audio_seconds,
        "voices_new": new.figures(),
        "voices_known": known.figures(),
        "differences": [asdict(difference) for difference in study.differences],
        "failures": [failure._asdict() for failure in study.failures.values()],
    }
    name.with_suffix(".json").write_text(json.dumps(figures, indent=4, default=str) + "\n", encoding="utf-8")
    header = ("voices", "seconds", "RTF", "first chunk, median ms", "forward calls", "chunks")
    print(table(header, [(voices, *one.figures().values()) for voices, one in (("new", new), ("known", known))]))
    print(f"Total flow matching forward calls: {known.forward_calls}")
    if study.differences:
        mels = [difference.mel_db for difference in study.differences]
        joint_dbs = [difference.joint_db for difference in study.differences if difference.joint_db is not None]
        joints = f", in cross-fades {statistics.mean(joint_dbs):.2f} dB" if joint_dbs else ""
        print(f"streamed against offline: mean distance of the mels {statistics.mean(mels):.2f} dB{joints}")
        worst = max(study.differences, key=lambda difference: difference.mel_db)
        print(f"largest: {worst.mel_db:.2f} dB in {worst.id}")
    show_failures(list(study.failures.values()), name.with_suffix(".json").name)
