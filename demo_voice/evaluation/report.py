"""The figures and targets as Markdown tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from cosyvoice_triton import stacks

Figures = Mapping[str, Any]

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
        lines.append(f"| {wanted} | {found} | {'reached' if reached else '**missed**'} |")
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


def _verdicts(rows: Sequence[Figures], nearness: Mapping[str, tuple[int, int]]) -> list[tuple[str, str, bool]]:
    """(target, value, whether it is reached)"""
    streamed = [row for row in rows if row["system"] == STREAMED]
    worst = max(row["wer"] for row in streamed)
    found = [(f"WER, streamed, at most {MOST_WER:.0%}", f"{worst:.1%} (the worst stack and voice)", worst <= MOST_WER)]
    offline = {(row["stack"], row["voice"]): row["wer"] for row in rows if row["system"] == OFFLINE}
    apart = max(row["wer"] - offline[row["stack"], row["voice"]] for row in streamed)
    found.append(
        (
            f"streamed within {100 * MOST_WER_APART:.0f} points of offline",
            f"{100 * apart:+.1f}",
            apart <= MOST_WER_APART,
        )
    )
    lengths = [row["lengths"] for row in streamed]
    least, most = min(each["least"] for each in lengths), max(each["most"] for each in lengths)
    wanted = f"lengths {LENGTHS[0]}–{LENGTHS[1]}× the teacher's"
    found.append((wanted, f"{least:.2f}–{most:.2f}", LENGTHS[0] <= least and most <= LENGTHS[1]))
    joints = [row["joints"] for row in streamed if "joints" in row]
    clicks, above, count = (sum(each[name] for each in joints) for name in ("clicks", "above", "count"))
    counted = f"{clicks} of {count} ({above} are above it within a pulse of the voice that is as steep near the joint)"
    found.append(
        ("no click: a step at an end of a cross-fade above the 99.9th percentile that stands out", counted, clicks == 0)
    )
    for stack, (near, of) in nearness.items():
        found.append((f"nearest to the voice of its reference, {stack}", f"{near} of {of}", near >= NEAR_SHARE * of))
    timed = [row for row in streamed if row["stack"] == TIMED_STACK]
    rtf, first = max(row["rtf"] for row in timed), max(row["first_chunk"]["median"] for row in timed)
    found.append((f"RTF, {TIMED_STACK}, at most {MOST_RTF}", f"{rtf:.2f}", rtf <= MOST_RTF))
    wanted = f"first chunk, {TIMED_STACK}, median at most {MOST_FIRST_CHUNK * 1000:.0f} ms"
    found.append((wanted, f"{first * 1000:.0f} ms", first <= MOST_FIRST_CHUNK))
    return found
