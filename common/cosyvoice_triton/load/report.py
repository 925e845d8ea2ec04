"""Reports of a run: upstream's two text files, summary.json, and lines, tables and plots for people."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from cosyvoice_triton.load.measure import PERCENTILES, TRANSPORT, ModelTimes, Run

Figures = Mapping[str, Any]
Cell = Callable[[Figures], object]
Columns = dict[str, Cell]  # by heading


STAGES = {  # in the order of the table; see `orchestrator.report.OnStage` and `measure.RequestOutcome.stages`
    "voice": "Prompt: Tokens, Mel, Text of the Voice",
    "llm": "LLM, until its First Token",
    "prompt_cache": "token2wav, Prompt Cache",
    "tokens": "LLM, until the Chunk's Last Token",
    "audio": "token2wav: Queue, Flow, Vocoder",
    TRANSPORT: "Request's Queue, Network, Client",
}
SHARES = ("p50", "p95", "p99")


def write_run(run: Run, settings: Mapping[str, Any], split: str, directory: Path) -> dict[str, Any]:
    """Write `rtf-<split>.txt`, `stats_summary-<split>.txt` and `summary.json`; return the content of the last.

    settings: those of the load, JSON-ready; includes `mode`.
    """
    summary = {**settings, **run.figures(), "models": [vars(model) for model in run.models]}
    summary["failures"] = {outcome.id: outcome.error for outcome in run.failed}
    summary["streams"] = [outcome.as_json() for outcome in run.outcomes]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"rtf-{split}.txt").write_text(rtf_text(summary), encoding="utf-8")
    (directory / f"stats_summary-{split}.txt").write_text(statistics_text(run.models), encoding="utf-8")
    (directory / "summary.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False), encoding="utf-8")
    return summary


def rtf_text(figures: Figures) -> str:
    """Return the figures under upstream's keys.

    Variances are of milliseconds here; upstream multiplies the variance in s^2 by 1000.
    """
    audio, elapsed = figures["audio_seconds"], figures["processing_seconds"]
    lines = [
        f"Mode: {figures['mode']}",
        f"RTF: {figures['rtf'] or float('inf'):.4f}",
        f"total_duration: {audio:.3f} seconds",
        f"({audio / 3600:.2f} hours)",
        f"processing time: {elapsed:.3f} seconds ({elapsed / 3600:.2f} hours)",
    ]
    if figures["mode"] == "offline":
        lines += _upstream_lines(figures["total_ms"], "latency")
    else:
        for title, key, name in (
            ("Total Request Latency", "total_ms", "total_request_latency"),
            ("First Chunk Latency", "first_chunk_ms", "first_chunk_latency"),
            ("Second Chunk Latency", "second_chunk_ms", "second_chunk_latency"),
        ):
            lines += ["", f"--- {title} ---", *_upstream_lines(figures[key], name)]
    return "\n".join(lines) + "\n"


def _upstream_lines(values: Mapping[str, float] | None, name: str) -> list[str]:
    if values is None:
        return [f"No {name.replace('_', ' ')} data collected."]
    return [
        f"{name}_variance: {values['variance']:.2f}",
        *(f"{name}_{share}_percentile_ms: {values[f'p{share}']:.2f}" for share in PERCENTILES),
        f"average_{name}_ms: {values['mean']:.2f}",
    ]


def statistics_text(models: Sequence[ModelTimes]) -> str:
    """Return Triton's statistics during the run, in upstream's format."""
    lines = ["Triton's statistics during the run, without the warm-up.", ""]
    for model in models:
        each = 1000 / max(model.requests + model.failures, 1)
        lines += [
            f"model name is {model.name}" + (f" at {model.server}" if len({m.server for m in models}) > 1 else ""),
            f"queue time {model.queue:<5.2f} s, compute infer time {model.compute_infer:<5.2f} s, "
            f"compute input time {model.compute_input:<5.2f} s, compute output time {model.compute_output:<5.2f} s",
            f"requests {model.requests}, failed {model.failures}, executions {model.executions}, "
            f"answered from the cache {model.cache_hits}, mean queue time {model.queue * each:.2f} ms",
        ]
    if not models:
        lines.append("The server reported no statistics.")
    return "\n".join(lines) + "\n"


def closing_lines(figures: Figures) -> list[str]:
    """Return the lines that are printed at the end of a run, beside its tables."""
    answered = figures["requests"] - figures["errors"] - figures["refused"] - figures["cancelled"]
    lines = [f"{answered} requests answered, {figures['errors']} failed, {figures['unsent']} not sent"]
    lines += [f"lost a server: {reason}" for reason in figures["lost_servers"].values()]
    if figures["client_lag_p95_ms"] > 5:
        lines.append(
            f"this client was {figures['client_lag_p95_ms']:.0f} ms late (95th percentile), which the figures include: "
            "run fewer streams from this machine, or stop other work on it"
        )
    return lines


# --- tables of one run or several -----------------------------------------------------------------------------------


def _part(key: str, name: str) -> Cell:
    """Return the cell of one figure of the distribution `key`, such as its "p95"."""
    return lambda row: _number(row[key] and row[key][name], 2)


def _latency(key: str) -> Columns:
    return {
        "Average (ms)": _part(key, "mean"),
        **{f"{share}th Percentile (ms)": _part(key, f"p{share}") for share in PERCENTILES},
    }


# After the first one, three are those of upstream's DiT page.
TABLES: dict[str, Columns] = {
    "First Audible Sample": {
        **_latency("audible_ms"),
        "Leading Silence (ms)": _part("silence_ms", "mean"),
        "Inaudible": itemgetter("inaudible"),
    },
    "Total Request Latency": {"RTF": lambda row: _number(row["rtf"], 4), **_latency("total_ms")},
    "First Chunk Latency": _latency("first_chunk_ms"),
    "Playback and Throughput": {
        "Requests": itemgetter("requests"),
        "Errors": itemgetter("errors"),
        "Refused": itemgetter("refused"),
        "Not Sent": itemgetter("unsent"),
        "Without a Gap": lambda row: _percent(row["share_without_gap"]),
        "Worst Gap (ms)": lambda row: _number(row["worst_gap_ms"], 0),
        "Without a Gap, No Buffer": lambda row: _percent(row["unbuffered_share_without_gap"]),
        "Peak in Flight": itemgetter("peak_in_flight"),
        "Later Chunks p95 (ms)": _part("later_chunk_ms", "p95"),
        "Requests per Second": lambda row: _number(row["requests_per_second"], 2),
        "Audio Seconds per Second": lambda row: _number(row["rtf"] and 1 / row["rtf"], 1),
    },
}
REFUSALS: Columns = {
    "Refused": itemgetter("refused"),
    "50th Percentile (ms)": _part("refusal_ms", "p50"),
    "95th Percentile (ms)": _part("refusal_ms", "p95"),
    "Longest (ms)": _part("refusal_ms", "max"),
}


def markdown_tables(rows: Sequence[Figures], label: str) -> str:
    """Return the tables of runs, without those that have nothing to show. label: title of the first column, whose cells
    are each run's `label`."""
    reported = {name for row in rows for name in row["stages_ms"]}
    stages: Columns = {title: partial(_stage, name) for name, title in STAGES.items() if name in reported}
    waits = "Where the First Chunk's Time Goes, Mean / 95th Percentile (ms)"
    shown = list(TABLES.items())
    if any(row["refused"] for row in rows):
        shown.append(("Refusals: Time until the Answer (ms)", REFUSALS))
    if stages:
        shown.append((waits, stages))
    tables = (f"#### {title}\n\n{_table({label: itemgetter('label'), **columns}, rows)}" for title, columns in shown)
    return "\n\n".join(tables) + "\n"


def disaggregated_table(rows: Sequence[Figures], gpus: int) -> str:
    """Return the table of upstream's page on disaggregated serving."""
    shares = {"avg": "mean", "p50": "p50", "p90": "p90", "p99": "p99"}
    columns: Columns = {
        "token2wav_num_gpu": lambda row: gpus,
        "concurrent_task_per_instance": itemgetter("concurrent_task_per_instance"),
        "concurrent_tasks_per_gpu": lambda row: f"{row['concurrent_tasks_per_gpu']:.2f}",
        **{f"{title} (ms)": _part("first_chunk_ms", name) for title, name in shares.items()},
    }
    return _table(columns, rows)


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table. Cells of type float have four digits; None is an empty cell."""
    lines = [[_cell(cell) for cell in line] for line in (head, *rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _table(columns: Columns, rows: Sequence[Figures]) -> str:
    return table(columns, [[cell(row) for cell in columns.values()] for row in rows])


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _stage(name: str, row: Figures) -> str:
    values = row["stages_ms"].get(name)
    return "" if values is None else f"{values['mean']:.1f} / {values['p95']:.1f}"


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


def plot_run(summary: Figures, title: str, path: Path) -> None:
    """Draw the latencies of a run, each as the share of the requests that it was enough for. summary: the result of
    `write_run`."""
    picture, ((axes,),) = figure(1, 1, 8, 5)
    axes.set(title=title, xlabel="ms", ylabel="share of requests", ylim=(0, 1.02), xscale="log")
    streams = [stream for stream in summary["streams"] if not stream["error"]]
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
    save(picture, path)


def plot_sweep(rows: Sequence[Figures], label: str, title: str, path: Path) -> None:
    """Draw first audible, whole answer, and throughput with gaps of a sweep.

    rows: `label` of a row is the swept number. label: of the x axis.
    """
    picture, (panels,) = figure(1, 3, 17, 5)
    picture.suptitle(title)
    xs = [float(row["label"]) for row in rows]
    for panel, key, what in ((panels[0], "audible_ms", "first audible"), (panels[1], "total_ms", "whole answer")):
        for share in SHARES:
            points = [(x, row[key][share]) for x, row in zip(xs, rows, strict=True) if row[key]]
            panel.plot(*np.reshape(points, (-1, 2)).T, marker="o", label=share)
        panel.set(title=what, ylabel="ms")
    points = [(x, 1 / row["rtf"]) for x, row in zip(xs, rows, strict=True) if row["rtf"]]
    panels[2].plot(*np.reshape(points, (-1, 2)).T, marker="o", color="tab:green", label="audio seconds per second")
    for x, row in zip(xs, rows, strict=True):
        if row["rtf"] and row["share_without_gap"] is not None:
            note = f"{100 * row['share_without_gap']:.0f} %"
            panels[2].annotate(note, (x, 1 / row["rtf"]), textcoords="offset points", xytext=(4, -12), fontsize=8)
    panels[2].set(title="throughput, and the share of streams without a gap", ylabel="audio seconds per second")
    for panel in panels:
        panel.set_xscale("log")  # sweeps usually double
        panel.set_xticks(sorted(set(xs)), [f"{x:g}" for x in sorted(set(xs))])
        panel.set_xticks([], minor=True)
        panel.margins(x=0.1)
        panel.set(xlabel=label, ylim=(0, 1.08 * panel.get_ylim()[1]))
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    save(picture, path)
