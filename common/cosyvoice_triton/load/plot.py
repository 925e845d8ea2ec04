"""Plots of runs and sweeps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.load.report import STAGES, Figures, stage_names

TIMELINE_STREAMS = 64  # drawn at most
SHARES = ("p50", "p95", "p99")


def figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """Return a matplotlib figure and its axes, (rows, columns), for a file."""
    import matplotlib  # here, because importing it takes long

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False)


def save(picture: Any, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=110)
    pyplot.close(picture)


# --- one run -----------------------------------------------------------------------------------------------------


def plot_run(summary: Figures, title: str, path: Path) -> None:
    """Draw latencies, the chunks of each stream over time, and gaps. summary: the result of `report.write_run`."""
    streams = [stream for stream in summary["streams"] if not stream["error"]]
    picture, axes = figure(1, 3, 17, 5)
    picture.suptitle(title)
    _latencies(axes[0][0], streams)
    _chunks(axes[0][1], streams)
    _slack(axes[0][2], streams, summary)
    save(picture, path)


def _latencies(axes: Any, streams: Sequence[Figures]) -> None:
    axes.set(title="latencies", xlabel="ms", ylabel="share of requests", ylim=(0, 1.02), xscale="log")
    arrivals = [stream["arrivals_ms"] for stream in streams]
    steps = [[after - before for before, after in zip(at, at[1:], strict=False)] for at in arrivals]
    for name, values in (
        ("first audible", [stream["audible_ms"] for stream in streams if stream["audible_ms"] is not None]),
        ("first chunk", [at[0] for at in arrivals]),
        ("second chunk, after the first", [step[0] for step in steps if step]),
        ("later chunks, each after the previous one", [value for step in steps for value in step[1:]]),
        ("whole answer", [stream["total_ms"] for stream in streams]),
    ):
        if values:
            axes.ecdf([max(value, 0.1) for value in values], label=name)
    if streams:
        axes.legend(loc="upper left", fontsize=8)
    axes.grid(alpha=0.3)


def _chunks(axes: Any, streams: Sequence[Figures]) -> None:
    shown = sorted(streams, key=lambda stream: stream["begun_s"])[:TIMELINE_STREAMS]
    for line, stream in enumerate(shown):
        begun = stream["begun_s"]
        at = [begun + arrival / 1000 for arrival in stream["arrivals_ms"]]
        axes.plot([begun, at[-1]], [line, line], color="0.8", linewidth=1, zorder=1)
        axes.scatter(begun, line, marker="|", color="black", s=25, zorder=2)
        sizes = [8 + 30 * samples / SAMPLE_RATE for samples in stream["samples"]]
        color = "tab:red" if stream["worst_gap_ms"] > 0 else "tab:blue"
        axes.scatter(at, [line] * len(at), s=sizes, color=color, alpha=0.7, linewidths=0, zorder=3)
    more = f", the first {len(shown)} of {len(streams)}" if len(shown) < len(streams) else ""
    axes.set(
        title=f"chunk arrivals{more}",
        xlabel="seconds since the run started\n| sent, ● chunk by length, red: a stream with a gap",
        ylabel="stream",
        ylim=(len(shown), -1),
    )


def _slack(axes: Any, streams: Sequence[Figures], summary: Figures) -> None:
    gaps = sum(stream["worst_gap_ms"] > 0 for stream in streams)
    axes.set(
        title=f"playback: {len(streams) - gaps} of {len(streams)} streams without a gap",
        xlabel="least audio left when a chunk arrives, ms (negative: a gap)\n"
        f"the player starts {summary['player_buffer_ms']:.0f} ms after the first chunk",
        ylabel="streams",
    )
    slack = [stream["least_slack_ms"] for stream in streams if stream["least_slack_ms"] is not None]
    if not slack:
        axes.text(0.5, 0.5, "every answer was a single chunk", transform=axes.transAxes, ha="center")
        return
    width = max((max(slack) - min(slack)) / 20, 1.0)
    edges = width * np.arange(np.floor(min(slack) / width), np.floor(max(slack) / width) + 2)  # zero is an edge
    _, _, bars = axes.hist(slack, bins=edges)
    for edge, bar in zip(edges, bars, strict=False):
        bar.set_color("tab:red" if edge < 0 else "tab:green")
    axes.axvline(0, color="black", linewidth=1)


# --- sweeps --------------------------------------------------------------------------------------------------------


def plot_sweep(rows: Sequence[Figures], label: str, title: str, path: Path) -> None:
    """Draw first audible, whole answer, throughput with gaps, and stages of a sweep.

    rows: `label` of a row is the swept number. label: of the x axis.
    """
    picture, axes = figure(2, 2, 13, 9)
    picture.suptitle(title)
    xs = [float(row["label"]) for row in rows]
    for panel, key, what in ((axes[0][0], "audible_ms", "first audible"), (axes[0][1], "total_ms", "whole answer")):
        for share in SHARES:
            points = [(x, row[key][share]) for x, row in zip(xs, rows, strict=True) if row[key]]
            panel.plot(*np.reshape(points, (-1, 2)).T, marker="o", label=share)
        panel.set(title=what, ylabel="ms")
    points = [(x, 1 / row["rtf"]) for x, row in zip(xs, rows, strict=True) if row["rtf"]]
    axes[1][0].plot(*np.reshape(points, (-1, 2)).T, marker="o", color="tab:green", label="audio seconds per second")
    for x, row in zip(xs, rows, strict=True):
        if row["rtf"] and row["share_without_gap"] is not None:
            note = f"{100 * row['share_without_gap']:.0f} %"
            axes[1][0].annotate(note, (x, 1 / row["rtf"]), textcoords="offset points", xytext=(4, -12), fontsize=8)
    axes[1][0].set(title="throughput, and the share of streams without a gap", ylabel="audio seconds per second")
    _stage_bars(axes[1][1], rows)
    for panel in (axes[0][0], axes[0][1], axes[1][0]):
        panel.set_xscale("log")  # sweeps usually double
        panel.set_xticks(sorted(set(xs)), [f"{x:g}" for x in sorted(set(xs))])
        panel.set_xticks([], minor=True)
        panel.margins(x=0.1)
        panel.set(xlabel=label, ylim=(0, 1.08 * panel.get_ylim()[1]))
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    save(picture, path)


def _stage_bars(axes: Any, rows: Sequence[Figures]) -> None:
    """Draw one bar per row, stacked from the mean share of each stage."""
    names, left = stage_names(rows), [0.0] * len(rows)
    for name in names:
        shares = [row["stages_ms"][name]["mean"] if name in row["stages_ms"] else 0.0 for row in rows]
        axes.barh([f"{row['label']}" for row in rows], shares, left=left, label=STAGES[name])
        left = [begin + share for begin, share in zip(left, shares, strict=True)]
    axes.set(title="first chunk by stage, mean", xlabel="ms")
    axes.invert_yaxis()
    if names:
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
    else:
        axes.text(0.5, 0.5, "the server reported no stages", transform=axes.transAxes, ha="center")
