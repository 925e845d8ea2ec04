"""The picture of a soak: requests by outcome, latency of the first part, memory of each process, and the faults."""

from pathlib import Path
from typing import Any

import numpy as np
from cosyvoice_triton.load.plot import figure, save

from tests.soak.ledger import OUTCOMES
from tests.soak.runner import SoakResult

COLORS = {
    "done": "tab:green",
    "cancelled": "tab:gray",
    "rejected": "tab:olive",
    "refused": "tab:orange",
    "failed": "tab:purple",
    "lost": "tab:red",
    "hung": "black",
}
BARS = 60  # at most


def plot_soak(result: SoakResult, title: str, path: Path) -> None:
    picture, axes = figure(4, 1, 15, 15)
    picture.suptitle(title)
    panels = [row[0] for row in axes]
    _outcomes(panels[0], result)
    _latencies(panels[1], result)
    _memory(panels[2], result)
    _handles(panels[3], result)
    for panel in panels:
        _faults(panel, result)
        panel.set_xlim(result.loaded / 60, result.seconds / 60)
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[0]:  # not if nothing was done at all
            panel.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    panels[-1].set_xlabel("minutes; vertical lines: faults, red: a service ends by it and is started again")
    save(picture, path)


def _outcomes(axes: Any, result: SoakResult) -> None:
    edges = np.linspace(
        result.loaded, result.seconds, 1 + int(min(BARS, max(1, (result.seconds - result.loaded) / 10)))
    )
    bottom = np.zeros(len(edges) - 1)
    for outcome in OUTCOMES:
        ended = [each.ended for each in result.ledger.requests if each.outcome == outcome and each.ended is not None]
        counts, _ = np.histogram(ended, edges)
        if counts.any():
            axes.bar(
                edges[:-1] / 60,
                counts,
                np.diff(edges) / 60,
                bottom,
                align="edge",
                color=COLORS[outcome],
                label=f"{outcome}: {sum(counts)}",
            )
        bottom += counts
    axes.set(title="requests by outcome", ylabel=f"requests in {edges[1] - edges[0]:.0f} s")


def _latencies(axes: Any, result: SoakResult) -> None:
    streamed = ("grpc", "speech", "speech-sse", "runtime-http", "runtime-grpc")
    for name, routes, color in (
        ("Triton's gRPC", streamed[:1], "tab:blue"),
        ("speech service", streamed[1:], "tab:cyan"),
    ):
        firsts = [
            (each.ended / 60, 1000 * (each.first - each.begun))
            for each in result.ledger.requests
            if each.route in routes and each.outcome == "done" and each.first is not None and each.ended is not None
        ]
        if firsts:
            axes.scatter(*zip(*firsts, strict=True), s=5, color=color, alpha=0.6, label=name)
    axes.set(title="first part of a streamed answer", ylabel="ms", yscale="log")


def _memory(axes: Any, result: SoakResult) -> None:
    _of_processes(axes, result, "memory", "-")
    servers = [process for process in result.processes if process.name == "tritonserver"]
    for process in servers:
        label = "/dev/shm of all" if process is servers[0] else ""
        axes.plot(np.array(process.at) / 60, process.shared, "--", color="black", label=label)
    axes.set(title="anonymous memory of each process", ylabel="MiB", yscale="log")


def _handles(axes: Any, result: SoakResult) -> None:
    _of_processes(axes, result, "threads", "-")
    _of_processes(axes, result, "files", ":")
    axes.set(title="threads (lines) and open files (dots) of each process", ylabel="number", yscale="log")


def _of_processes(axes: Any, result: SoakResult, measure: str, style: str) -> None:
    """Draws one line per process; those of one name have one colour, and one entry of the legend."""
    colors: dict[str, str] = {}
    for process in result.processes:
        label = "" if process.name in colors or style == ":" else process.name
        color = colors.setdefault(process.name, f"C{len(colors)}")
        axes.plot(np.array(process.at) / 60, getattr(process, measure), style, color=color, label=label)


def _faults(axes: Any, result: SoakResult) -> None:
    for fault in result.faults:
        axes.axvline(
            fault.begun / 60, color="tab:red" if fault.kind.ends else "0.6", linewidth=0.8, alpha=0.7, zorder=0
        )
