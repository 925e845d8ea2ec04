"""Measure what is audible where a text is divided into segments: the pause between them and the change of level.

    python -m demo_voice.evaluation.segments

Two neighbouring sentences are spoken once as one segment and once as two, on the real tritonserver; the first ends with
its own mark, or with a comma, where a sentence that is too long is divided. A segment sounds the same alone and within
a longer text, so two segments are two requests. Prints quartiles over all pairs and voices, and which speech tokens the
checkpoint's tokenizer gives to silence (`silent_tokens` in docs/voices.md).
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.client.requests import Utterance
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE, TOKEN_RATE
from cosyvoice_triton.server.rendering import StackOptions, render
from cosyvoice_triton.server.tritonserver import Ports, TritonServer
from cosyvoice_triton.voice.audio import resample
from cosyvoice_triton.voice.encoders import AudioTokenizer

from demo_voice.evaluation import HELD_OUT
from demo_voice.evaluation.takes import request_takes, seeded

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


def spoken(models: Path, stack: str, voices: Sequence[str], texts: Sequence[str]) -> list[np.ndarray]:
    """Each text in each voice, from the server: the waveforms (N,) of the first voice, then of the next."""
    options = StackOptions(models_dir=models, stack=stack, device="cpu")
    requests = [Utterance(text, speaker=voice, parameters=seeded(0)) for voice in voices for text in texts]
    with tempfile.TemporaryDirectory() as work:
        render(options, Path(work, "repository"))
        with TritonServer(Path(work, "repository"), ports=Ports(0, 0, 0), log_file=Path(work, "log")) as server:
            takes = request_takes(server.grpc_url, options.orchestrator, "streaming", requests)
    return [take.waveform for take in takes]


def tokens_by_sound(tokenizer: AudioTokenizer, waves: Sequence[np.ndarray]) -> tuple[Counter[int], Counter[int]]:
    """How often the tokenizer gives each speech token to silent frames of 24 kHz audio, and to others."""
    silent, sounding = Counter[int](), Counter[int]()
    for wave in waves:
        (ids,) = tokenizer([resample(torch.from_numpy(wave), SAMPLE_RATE, PROMPT_SAMPLE_RATE).numpy()])
        length = SAMPLE_RATE // TOKEN_RATE
        frames = np.pad(wave, (0, length))[: length * len(ids)].reshape(len(ids), length)
        power = 10 * np.log10((frames.astype(np.float64) ** 2).mean(axis=1) + 1e-12)
        quiet = power <= power.max() + SILENT_DB
        silent.update(ids[quiet].tolist())
        sounding.update(ids[~quiet].tolist())
    return silent, sounding


def report(rows: Sequence[dict[str, float]]) -> str:
    lines = ["| | 25 % | median | 75 % | largest |", "|---|---|---|---|---|"]
    for name in rows[0]:
        quartiles = np.percentile([row[name] for row in rows], (25, 50, 75, 100))
        lines.append(f"| {name} | " + " | ".join(f"{value:.4g}" for value in quartiles) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", type=Path, default=Path("models/demo"), help="as cosyvoice_triton.demo_checkpoint.make writes it"
    )
    parser.add_argument("--stack", choices=stacks.names(), default=stacks.DEFAULT.name)
    parser.add_argument("--voices", nargs="+", default=("slt", "rms"), help="names in the folder voices of the models")
    args = parser.parse_args(argv)
    lines = HELD_OUT.read_text(encoding="utf-8").splitlines()
    pairs = list(zip(lines[::2], lines[1::2], strict=False))
    clauses = [(f"{first.rstrip('.?!')},", second) for first, second in pairs]
    together: list[np.ndarray] = []
    try:
        for mark, joined in (("end of a sentence", pairs), ("comma", clauses)):
            texts = [text for first, second in joined for text in (f"{first} {second}", first, second)]
            waves = spoken(args.models, args.stack, args.voices, texts)
            rows = [compared(*waves[at : at + 3]) for at in range(0, len(waves), 3)]
            print(f"{mark}, {len(rows)} pairs of sentences\n\n{report(rows)}\n", flush=True)
            together += waves[::3]
        tokenizer = AudioTokenizer(args.models / stacks.named(args.stack).checkpoint)
    except (ValueError, RuntimeError, OSError) as error:  # ClientError and ServerError are RuntimeErrors
        print(f"voice_evaluation.segments: {error}", file=sys.stderr)
        return 1
    silent, sounding = tokens_by_sound(tokenizer, together)
    print(f"{silent.total()} silent tokens of {len(silent)} ids, {sounding.total()} others; id: silent, other uses")
    print(", ".join(f"{token}: {count}, {sounding[token]}" for token, count in silent.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
