"""The vocoder alone: speech tokens and a recording of the voice in, audio files and their cost out.

    python scripts/token2wav.py --model-dir models/demo/CosyVoice2-0.5B
    python scripts/token2wav.py --tokens-path out/offline/samples.jsonl --batch-size 8 --warmup 3
    python scripts/token2wav.py --streaming --strategy exponential

Utterances are rendered whole, --batch-size of them together, or with --streaming in the chunks that a listener would
get; scripts/streaming_inference.py compares the two.

The speech tokens are a data set's column target_audio_cosy2_tokens, or of the same name in the file of --tokens-path,
which scripts/offline_inference.py writes as samples.jsonl. A sample without any says its own recording again.

The folder gets <id>.wav and token2wav.json. The figures are of the last of --warmup passes over the samples, each with
voices made anew. Loading the networks and a warm-up come before the first one; writing files is not in them.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.constants import SAMPLE_RATE
from common.orchestrator.chunking import HopRules
from tools.load.jobs import positive_int
from tools.load.samples import Sample
from tools.offline.inputs import Voices, add_vocoder_arguments, read_samples, with_tokens
from tools.offline.pipeline import batches
from tools.offline.results import save_wav, write_text
from tools.offline.stages import Stages, table
from tools.offline.tool import Failure, exit_code, show_failures, show_resynthesis
from tools.offline.vocoder import OfflineVocoder, Utterance

STAGES = ("voice", "token2wav")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_code("token2wav", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Raises ValueError, RuntimeError or OSError where it cannot begin."""
    samples = with_tokens(read_samples(args), args.tokens_path)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    vocoder = OfflineVocoder.load(args.model_dir, args.device, args.batch_size if args.streaming else 0)
    voices = Voices(args.model_dir, args.device)
    voices.warm_up()
    with tqdm(total=args.warmup * len(samples), desc="token2wav", unit="sample") as progress:
        for _ in range(args.warmup):
            voices.forget()
            epoch = Epoch(voices, vocoder, vocoder.rules(args.strategy) if args.streaming else None, args.output_dir)
            for batch in batches(samples, args.batch_size):
                epoch.render(batch)
                progress.update(len(batch))
    report(args, samples, vocoder, epoch)
    return 1 if epoch.failures else 0


@dataclass
class Epoch:
    """One pass over the samples. `rules`: how streams are cut; None renders whole utterances."""

    voices: Voices
    vocoder: OfflineVocoder
    rules: HopRules | None
    output_dir: Path
    stages: Stages = field(default_factory=lambda: Stages(STAGES))
    audio_seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    def render(self, samples: Sequence[Sample]) -> None:
        """A batch, to its files."""
        spoken: list[tuple[Sample, Utterance]] = []
        for sample in samples:
            try:
                with self.stages.time("voice"):
                    spoken.append((sample, self.voices.utterance(sample)))
            except Exception as error:
                self.failures.append(Failure.of(sample, "voice", error))
        with self.stages.time("token2wav"):
            rendered = self._rendered([utterance for _, utterance in spoken])
        for (sample, _), audio in zip(spoken, rendered, strict=True):
            try:
                if isinstance(audio, Exception):
                    raise audio
                save_wav(self.output_dir / f"{sample.id}.wav", audio)
                self.audio_seconds += len(audio) / SAMPLE_RATE
            except Exception as error:
                self.failures.append(Failure.of(sample, "token2wav", error))

    def _rendered(self, utterances: Sequence[Utterance]) -> list[np.ndarray | Exception]:
        if self.rules is None:
            return self.vocoder.whole(utterances) if utterances else []
        streamed = self.vocoder.streamed(utterances, self.rules)
        return [each if isinstance(each, Exception) else np.concatenate(each.waveforms) for each in streamed]


def report(args: argparse.Namespace, samples: Sequence[Sample], vocoder: OfflineVocoder, epoch: Epoch) -> None:
    """The figures on the screen and as JSON."""
    total = sum(epoch.stages.seconds.values())
    how = f"streamed ({args.strategy})" if args.streaming else "whole"
    print(f"{vocoder.name}, {how}, batches of {args.batch_size}: {epoch.audio_seconds:.1f} s of audio")
    figures = {
        "args": vars(args),
        "vocoder": vocoder.name,
        "samples": len(samples),
        "samples_that_say_their_recording": show_resynthesis(samples),
        "total_audio_duration_seconds": epoch.audio_seconds,
        **epoch.stages.figures(epoch.audio_seconds, total),
        "failures": [failure._asdict() for failure in epoch.failures],
    }
    path = args.output_dir / "token2wav.json"
    write_text(path, json.dumps(figures, indent=4, default=str) + "\n")
    rows = [(stage, figures[f"{stage}_time_seconds"], figures[f"{stage}_rtf"]) for stage in (*STAGES, "pipeline")]
    print(table(("stage", "seconds", "RTF"), rows))
    print(f"Measurement epoch time taken: {total:.4f} seconds")
    show_failures(epoch.failures, path.name)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_vocoder_arguments(parser)
    parser.add_argument("--batch-size", type=positive_int, default=4, help="utterances at once (default: %(default)s)")
    parser.add_argument("--warmup", type=positive_int, default=1, help="passes, of which the last is measured")
    parser.add_argument("--streaming", action="store_true", help="chunk by chunk instead of whole")
    parser.add_argument("--strategy", choices=("equal", "exponential"), default="exponential", help="of --streaming")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
