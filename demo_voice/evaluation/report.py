"""The figures and targets as Markdown tables, and a plot of spectrograms."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.load.plot import figure, save
from cosyvoice_triton.voice import audio

from demo_voice.evaluation.takes import Take

Figures = Mapping[str, Any]

NOT_GIVEN = "not given"
STREAMED, OFFLINE = "text to audio, streamed", "text to audio, offline"
# Targets.
MOST_WER, MOST_WER_APART = 0.20, 0.03
LENGTHS = (0.6, 1.6)
NEAR_SHARE = 0.9
MOST_RTF, MOST_FIRST_CHUNK, TIMED_STACK = 0.5, 0.4, stacks.DIT.name


def markdown(rows: Sequence[Figures], nearness: Mapping[str, tuple[int, int]], about: str) -> str:
    """nearness: (outputs most similar to the wanted voice, all outputs) of each stack."""
    columns = (
        "audio",
        "stack",
        "voice",
        "WER",
        "length / teacher's",
        "ends of cross-fades above the usual step",
        "RTF",
        "first chunk",
    )
    lines = [about, "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *map(_row, rows)]
    lines += ["", "| wanted | found | |", "|---|---|---|"]
    for wanted, found, reached in _verdicts(rows, nearness):
        lines.append(f"| {wanted} | {found} | {'' if reached is None else 'reached' if reached else '**missed**'} |")
    return "\n".join(lines) + "\n"


def _row(row: Figures) -> str:
    lengths, joints, first = (row.get(name) for name in ("lengths", "joints", "first_chunk"))
    cells = [
        row["system"],
        row["stack"],
        row["voice"],
        f"{row['wer']:.1%}",
        f"{lengths['median']:.2f} ({lengths['least']:.2f}–{lengths['most']:.2f})" if lengths else "",
        _joints_cell(joints),
        f"{row['rtf']:.2f}" if "rtf" in row else "",
        f"{first['median'] * 1000:.0f} ms, p95 {first['p95'] * 1000:.0f} ms" if first else "",
    ]
    return f"| {' | '.join(cells)} |"


def _joints_cell(joints: Mapping[str, Any] | None) -> str:
    if not joints:
        return ""
    return f"{joints['above']} of {joints['count']}, largest {joints['worst']:.2f}×, {joints['clicks']} clicks"


def _verdicts(rows: Sequence[Figures], nearness: Mapping[str, tuple[int, int]]) -> list[tuple[str, str, bool | None]]:
    """(target, value, whether it is reached or None if unknown)"""
    streamed = [row for row in rows if row["system"] == STREAMED]
    worst = max(row["wer"] for row in streamed)
    found: list[tuple[str, str, bool | None]] = [
        (f"WER, streamed, at most {MOST_WER:.0%}", f"{worst:.1%} (the worst stack and voice)", worst <= MOST_WER)
    ]
    offline = {(row["stack"], row["voice"]): row["wer"] for row in rows if row["system"] == OFFLINE}
    apart = max(row["wer"] - offline[row["stack"], row["voice"]] for row in streamed)
    found.append(
        (
            f"streamed within {100 * MOST_WER_APART:.0f} points of offline",
            f"{100 * apart:+.1f}",
            apart <= MOST_WER_APART,
        )
    )
    wanted = f"lengths {LENGTHS[0]}–{LENGTHS[1]}× the teacher's"
    if lengths := [row["lengths"] for row in streamed if "lengths" in row]:
        least, most = min(each["least"] for each in lengths), max(each["most"] for each in lengths)
        found.append((wanted, f"{least:.2f}–{most:.2f}", LENGTHS[0] <= least and most <= LENGTHS[1]))
    else:
        found.append((wanted, NOT_GIVEN, None))
    joints = [row["joints"] for row in streamed if "joints" in row]
    clicks, above, count = (sum(each[name] for each in joints) for name in ("clicks", "above", "count"))
    counted = f"{clicks} of {count} ({above} are above it within a pulse of the voice that is as steep near the joint)"
    found.append(
        ("no click: a step at an end of a cross-fade above the 99.9th percentile that stands out", counted, clicks == 0)
    )
    for stack, (near, of) in nearness.items():
        found.append((f"nearest to the voice of its reference, {stack}", f"{near} of {of}", near >= NEAR_SHARE * of))
    timed = [row for row in streamed if row["stack"] == TIMED_STACK]
    if timed:
        rtf, first = max(row["rtf"] for row in timed), max(row["first_chunk"]["median"] for row in timed)
        found.append((f"RTF, {TIMED_STACK}, at most {MOST_RTF}", f"{rtf:.2f}", rtf <= MOST_RTF))
        wanted = f"first chunk, {TIMED_STACK}, median at most {MOST_FIRST_CHUNK * 1000:.0f} ms"
        found.append((wanted, f"{first * 1000:.0f} ms", first <= MOST_FIRST_CHUNK))
    return found


def draw(takes: Mapping[str, Take], path: Path) -> None:
    """Log mel spectrograms of one sentence, one above the other, on one time axis."""
    picture, axes = figure(len(takes), 1, 12, 2.6 * len(takes))
    longest = max(take.seconds for take in takes.values())
    for (name, take), (axis,) in zip(takes.items(), axes, strict=True):
        wave = audio.resample(torch.from_numpy(take.waveform), take.rate, SAMPLE_RATE)
        mel = audio.mel_spectrogram(wave[None])[0].numpy()  # (80, T)
        axis.imshow(
            mel, origin="lower", aspect="auto", extent=(0, take.seconds, 0, len(mel)), vmin=np.log(1e-5), vmax=2
        )
        axis.set(title=f"{name}: {take.text}", ylabel="mel band", xlim=(0, longest))
    axes[-1][0].set_xlabel("s")
    save(picture, path)
