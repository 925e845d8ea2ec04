"""Figures of answers, their table and plot, what is required of them, and the fewest Euler steps that speak as well."""

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from cosyvoice_triton import samples, stacks
from cosyvoice_triton.audible import leading_silence
from cosyvoice_triton.config import Token2WavConfig
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.evaluate.speech import SpokenSentence
from cosyvoice_triton.load.report import figure, save, table
from cosyvoice_triton.server.options import StackOptions
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.voice.audio import load_recording
from cosyvoice_triton.voice.encoders import ReferenceEncoder

Row = dict[str, Any]
REFERENCE_STEPS = 100  # of the demo's DiT, 400 change their mel by 0.003; 10 are 0.036 off
MAX_VOICES, MAX_SECONDS = 4, 5.0  # rendered for the error
# Rows that differ by less are as good: half a word in a hundred, 0.05 of DNSMOS.
TOLERATED = {"error_rate": 0.005, "dnsmos": -0.05}


class Column(NamedTuple):
    """A figure of the table. heading and format: of its cell. each: the answers' figure of which it is a summary."""

    heading: str
    format: str
    each: str = ""


COLUMNS = {
    "failed": Column("failed", "d"),
    "mel_error": Column("mel error", ".3f"),
    "error_rate": Column("wrong words", ".1%", "error_rate"),
    "dnsmos": Column("DNSMOS", ".2f", "dnsmos"),
    "similarity": Column("similarity", ".2f", "similarity"),
    "rtf": Column("RTF", ".2f", "rtf"),
    "first_audible_ms": Column("first audible, ms", ".0f", "first_audible_ms"),
    "first_audible_p95_ms": Column("p95", ".0f"),
    "first_chunk_ms": Column("first chunk, ms", ".0f"),
    "leading_silence_ms": Column("leading silence, ms", ".0f", "leading_silence_ms"),
    "leading_silence_p95_ms": Column("p95", ".0f"),
    "silent": Column("silent", ".1%"),
    "clipped": Column("clipped", ".1%"),
}
FULL_SCALE = 0.98  # HiFT limits its audio to 0.99
ONSET_SECONDS, ONSET_SCALE = 0.6, 0.1  # of a picture; its height is this share of the answer's, for breaths and an f


@dataclass(frozen=True)
class Requirement:
    """A limit of a figure, such as error_rate<=0.1."""

    name: str
    at_most: bool
    limit: float

    @classmethod
    def read(cls, text: str) -> "Requirement":
        """Parses a requirement of a command line."""
        match = re.fullmatch(r"(\w+)(<=|>=)([0-9.]+)", text)
        if match is None or match[1] not in COLUMNS:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not NAME<=NUMBER or NAME>=NUMBER; names: {', '.join(COLUMNS)}"
            )
        return cls(match[1], match[2] == "<=", float(match[3]))

    def missed_by(self, row: Row) -> str:
        """Return what is wrong with a row, in a line; "" if nothing is."""
        value = row.get(self.name)
        sign = "<=" if self.at_most else ">="
        if value is not None and (value <= self.limit if self.at_most else value >= self.limit):
            return ""
        found = "was not measured" if value is None else f"is {value:.3g}"
        return f"{row['name']}: {self.name} {found}, required {sign} {self.limit:g}"


def measures(answer: SpokenSentence) -> dict[str, float]:
    """Return what an answer shows without a judge; unknown figures are left out."""
    wave, outcome = answer.wave, answer.outcome
    if wave is None:
        return {}
    silence = leading_silence(wave)
    high = np.abs(wave) >= FULL_SCALE
    found = {"silent": float(silence is None), "clipped": float((high[2:] & high[1:-1] & high[:-2]).any())}
    if silence is not None:
        found["leading_silence_ms"] = 1000 * silence
    if outcome is not None:
        found |= {"total": outcome.total, "seconds": outcome.seconds, "rtf": outcome.total / outcome.seconds}
        found["first_chunk_ms"] = 1000 * outcome.arrivals[0]
        if (heard := outcome.audible()) is not None:
            found["first_audible_ms"] = 1000 * heard
    return found


def summary(name: str, found: Sequence[Mapping[str, Any]]) -> Row:
    """Return the row of a table from the figures of its answers, of which those that failed have none."""
    good = [each for each in found if each]

    def values(key: str) -> list[float]:
        return [each[key] for each in good if key in each]

    def ratio(of: str, over: str) -> float | None:
        return sum(values(of)) / total if (total := sum(values(over))) else None

    row: Row = {"name": name, "answers": len(found), "failed": len(found) - len(good), "mel_error": None}
    row["error_rate"], row["rtf"] = ratio("errors", "units"), ratio("total", "seconds")
    for key in ("dnsmos", "similarity", "silent", "clipped"):
        row[key] = float(np.mean(values(key))) if values(key) else None
    for key in ("first_audible_ms", "first_chunk_ms", "leading_silence_ms"):
        row[key] = float(np.median(values(key))) if values(key) else None
    for key in ("first_audible", "leading_silence"):
        found_ms = values(f"{key}_ms")
        row[f"{key}_p95_ms"] = float(np.percentile(found_ms, 95)) if found_ms else None
    return row


def markdown(rows: Sequence[Row]) -> str:
    """Return the table, without columns that no row has."""
    shown = {name: column for name, column in COLUMNS.items() if any(row[name] is not None for row in rows)}
    cells = [
        [row["name"], *("" if row[name] is None else f"{row[name]:{of.format}}" for name, of in shown.items())]
        for row in rows
    ]
    return table(["", *(column.heading for column in shown.values())], cells)


def plot(found: Mapping[str, Sequence[Mapping[str, Any]]], title: str, path: Path) -> None:
    """Draw the distribution of each figure over the answers, a line for each row."""
    names = [column.each for column in COLUMNS.values() if column.each]
    names = [name for name in names if any(name in each for row in found.values() for each in row)]
    columns = min(3, len(names))
    picture, axes = figure(math.ceil(len(names) / columns), columns, 5 * columns, 4 * math.ceil(len(names) / columns))
    picture.suptitle(title)
    for panel, name in zip(axes.flat, names, strict=False):
        for row, answers in found.items():
            if values := [each[name] for each in answers if name in each]:
                panel.ecdf(values, label=row)
        panel.set(title=name, ylabel="share of answers")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    save(picture, path)


def plot_onsets(spoken: Sequence[tuple[str, Sequence[SpokenSentence]]], output: Path) -> list[str]:
    """Draw how the first answers of each row begin, before and after their silence is cut, with the onset that
    `audible` finds; return the names of the pictures. Rows that were read from folders have none."""
    names = []
    for name, answers in spoken:
        pairs = [(each.sample.target_text, each.untrimmed, each.wave) for each in answers if each.untrimmed is not None]
        shown = [(text, before, after) for text, before, after in pairs if after is not None]
        if not shown:
            continue
        picture, axes = figure(len(shown), 2, 12, 1.6 * len(shown))
        for panels, (text, before, after) in zip(axes, shown, strict=True):
            _draw_onset(panels[0], f"before: {text[:50]}", before)
            _draw_onset(panels[1], "after", after)
        names.append(f"onsets-{name}.png")
        save(picture, output / names[-1])
    return names


def _draw_onset(panel: Any, title: str, wave: np.ndarray) -> None:
    begin, most = wave[: round(ONSET_SECONDS * SAMPLE_RATE)], float(np.abs(wave).max(initial=1e-3))
    panel.plot(1000 * np.arange(begin.size) / SAMPLE_RATE, begin, linewidth=0.5)
    if (silence := leading_silence(wave)) is not None:
        panel.axvline(1000 * silence, color="tab:red", label=f"onset, {1000 * silence:.0f} ms")
        panel.legend(fontsize=7, loc="upper right")
    panel.set_title(title, fontsize=8, loc="left")
    panel.set(xlim=(0, 1000 * ONSET_SECONDS), ylim=(-ONSET_SCALE * most, ONSET_SCALE * most))


def mel_errors(options: StackOptions, steps: Sequence[int]) -> list[float]:
    """Return for each number of steps the root mean square error of the mel against REFERENCE_STEPS, in standard
    deviations of the mel: the registered recordings, or the package's sample, are rendered again from their tokens, on
    the CPU in float32. ValueError if the checkpoint has a time grid of its own."""
    stack, folder = stacks.named(options.stack), options.checkpoint_dir
    paths = sorted(options.voices_dir.glob("*.wav"))[:MAX_VOICES] or [samples.FOLDER / "reference_en.wav"]
    encoder = ReferenceEncoder(stack, folder)
    voices = [load_recording(path) for path in paths]
    prompts = [encoder(replace(voice, wav=voice.wav[: round(MAX_SECONDS * voice.rate)])) for voice in voices]
    mels = []
    for count in (REFERENCE_STEPS, *steps):
        config = Token2WavConfig(
            model_dir=str(folder),
            device="cpu",
            flow_runtime="torch",
            flow_precision="float32",
            vocoder_precision="float32",
            n_timesteps=count,
            max_streams=1,
        )
        engine = Token2Wav.from_config(stack, config)
        mels.append(torch.cat(engine.whole_mels([(prompt, prompt.tokens) for prompt in prompts]), dim=1))
    exact = mels[0]
    return [((mel - exact).square().mean().sqrt() / exact.std()).item() for mel in mels[1:]]


def recommended(rows: Sequence[Row], steps: Sequence[int]) -> int | None:
    """Return the fewest steps whose row is no worse than that of the most by more than TOLERATED; None without words
    and DNSMOS, by which speech is judged."""
    of = dict(zip(steps, rows, strict=True))
    most = of[max(steps)]
    judged = [name for name in TOLERATED if most[name] is not None]
    if not judged:
        return None

    def as_good(row: Row) -> bool:
        return all((row[name] - most[name]) / TOLERATED[name] <= 1 for name in judged)

    return min(count for count, row in of.items() if as_good(row))
