"""Measure what is audible where a text is divided into segments: the pause between them and the change of level.

    python -m tools.voice_evaluation.segments

Two neighbouring sentences are spoken once as one segment and once as two, on the real tritonserver. A segment sounds
the same alone and within a longer text, so the second case is two requests. Prints quartiles over all pairs and voices.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common import stacks
from common.client.requests import Utterance
from common.constants import SAMPLE_RATE
from common.server.rendering import StackOptions, render
from common.server.tritonserver import Ports, TritonServer
from tools.voice_evaluation import HELD_OUT
from tools.voice_evaluation.takes import request_takes, seeded

FRAME = SAMPLE_RATE // 100  # 10 ms
SILENT_DB = -40.0  # frames this far below the loudest one are silent


class Levels(NamedTuple):
    """Silence at the ends of a waveform in ms, its longest silence between words, the level of what is not silent.

    split: the sample in the middle of that longest silence.
    """

    before: int
    after: int
    longest: int
    split: int
    decibels: float


def levels_of(waveform: np.ndarray) -> Levels:
    """Of audio (N,) that is not silent throughout."""
    frames = waveform[: len(waveform) // FRAME * FRAME].reshape(-1, FRAME)
    power = 10 * np.log10((frames.astype(np.float64) ** 2).mean(axis=1) + 1e-12)
    sounding = np.flatnonzero(power > power.max() + SILENT_DB)
    gaps = np.diff(sounding) - 1  # silent frames between sounding ones
    widest = int(gaps.argmax())
    return Levels(
        before=10 * int(sounding[0]),
        after=10 * int(len(power) - 1 - sounding[-1]),
        longest=10 * int(gaps[widest]),
        split=FRAME * int(sounding[widest] + 1 + gaps[widest] // 2),
        decibels=float(10 * np.log10((10 ** (power[sounding] / 10)).mean())),
    )


def compared(together: np.ndarray, first: np.ndarray, second: np.ndarray) -> dict[str, float]:
    """The figures of one pair of sentences: spoken as one segment, and as two."""
    inside, one, other = levels_of(together), levels_of(first), levels_of(second)
    halves = [levels_of(half).decibels for half in (together[: inside.split], together[inside.split :])]
    return {
        "pause inside a segment, ms": inside.longest,
        "pause between segments, ms": one.after + other.before,
        "of it at the end of the first, ms": one.after,
        "of it at the start of the second, ms": other.before,
        "level change inside a segment, dB": abs(halves[1] - halves[0]),
        "level change between segments, dB": abs(other.decibels - one.decibels),
    }


def measure(models: Path, stack: str, voices: Sequence[str], sentences: Sequence[str]) -> list[dict[str, float]]:
    pairs = list(zip(sentences[::2], sentences[1::2], strict=False))
    texts = [text for first, second in pairs for text in (f"{first} {second}", first, second)]
    options = StackOptions(models_dir=models, stack=stack, device="cpu")
    found = []
    with tempfile.TemporaryDirectory() as work:
        render(options, Path(work, "repository"))
        with TritonServer(Path(work, "repository"), ports=Ports(0, 0, 0), log_file=Path(work, "log")) as server:
            for voice in voices:
                requests = [Utterance(text, speaker=voice, parameters=seeded(0)) for text in texts]
                takes = iter(request_takes(server.grpc_url, options.orchestrator, "streaming", requests))
                found += [
                    compared(*(take.waveform for take in three)) for three in zip(takes, takes, takes, strict=True)
                ]
    return found


def report(rows: Sequence[dict[str, float]]) -> str:
    lines = ["| | 25 % | median | 75 % | largest |", "|---|---|---|---|---|"]
    for name in rows[0]:
        quartiles = np.percentile([row[name] for row in rows], (25, 50, 75, 100))
        lines.append(f"| {name} | " + " | ".join(f"{value:.4g}" for value in quartiles) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("models/demo"), help="as tools.demo_model.make writes it")
    parser.add_argument("--stack", choices=stacks.names(), default=stacks.DEFAULT.name)
    parser.add_argument("--voices", nargs="+", default=("slt", "rms"), help="names in the folder voices of the models")
    args = parser.parse_args(argv)
    try:
        rows = measure(args.models, args.stack, args.voices, HELD_OUT.read_text(encoding="utf-8").splitlines())
    except (ValueError, RuntimeError, OSError) as error:  # ClientError and ServerError are RuntimeErrors
        print(f"voice_evaluation.segments: {error}", file=sys.stderr)
        return 1
    print(f"{len(rows)} pairs of sentences\n{report(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
