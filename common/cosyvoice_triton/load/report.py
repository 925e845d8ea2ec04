"""Reports of a run: upstream's two text files, summary.json, and lines and tables for people."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cosyvoice_triton.load.measure import PERCENTILES, TRANSPORT, Run
from cosyvoice_triton.load.statistics import ModelTimes

GIB = 1 << 30
Figures = Mapping[str, Any]


class Stage(NamedTuple):
    """Titles of a stage in plots and in tables."""

    short: str
    long: str


STAGES = {  # in plotting order; see `orchestrator.callbacks.OnStage` and `measure.RequestOutcome.stages`
    "voice": Stage("prompt", "Prompt: Tokens, Mel, Text of the Voice"),
    "llm": Stage("LLM, first token", "LLM, until its First Token"),
    "prompt_cache": Stage("prompt cache in token2wav", "token2wav, Prompt Cache"),
    "tokens": Stage("LLM, the chunk's tokens", "LLM, until the Chunk's Last Token"),
    "audio": Stage("token2wav: queue, flow, vocoder", "token2wav: Queue, Flow, Vocoder"),
    TRANSPORT: Stage("request's queue, network", "Request's Queue, Network, Client"),
}


def write_run(run: Run, settings: Mapping[str, Any], split: str, directory: Path) -> dict[str, Any]:
    """Writes `rtf-<split>.txt`, `stats_summary-<split>.txt` and `summary.json`; returns the content of the last.

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
    """Returns the figures under upstream's keys.

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
    """Returns Triton's statistics during the run, in upstream's format."""
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
    """Returns the lines that are printed at the end of a run."""
    answered = figures["requests"] - figures["errors"] - figures["refused"] - figures["cancelled"]
    lines = [f"{answered} requests answered, {figures['errors']} failed, {figures['unsent']} not sent"]
    if refusal := figures["refusal_ms"]:
        shares = f"p50 {refusal['p50']:.0f}  p95 {refusal['p95']:.0f}  max {refusal['max']:.0f} ms"
        lines.append(
            f"{figures['refused']} refused, because the server has as many listeners as it can serve: {shares}"
        )
    lines += [f"lost a server: {reason}" for reason in figures["lost_servers"].values()]
    for title, key in (
        ("first chunk", "first_chunk_ms"),
        ("first audible", "audible_ms"),
        ("leading silence", "silence_ms"),
        ("total", "total_ms"),
    ):
        if values := figures[key]:
            shares = "  ".join(f"p{share} {values[f'p{share}']:.0f}" for share in PERCENTILES)
            lines.append(f"{title:13s} mean {values['mean']:.0f}  {shares} ms")
    if figures["rtf"] is not None:
        lines.append(
            f"{figures['audio_seconds']:.1f} s of audio in {figures['processing_seconds']:.2f} s: "
            f"real-time factor {figures['rtf']:.4f}, {1 / figures['rtf']:.1f} s of audio per second"
        )
    if figures["mode"] == "streaming" and figures["share_without_gap"] is not None:
        lines.append(
            f"{100 * figures['share_without_gap']:.1f} % of the streams without a gap, worst gap "
            f"{figures['worst_gap_ms']:.0f} ms (a player that starts {figures['player_buffer_ms']:.0f} ms after the "
            f"first chunk), {100 * figures['unbuffered_share_without_gap']:.1f} % and "
            f"{figures['unbuffered_worst_gap_ms']:.0f} ms for a player without a buffer"
        )
    if figures["client_lag_p95_ms"] > 5:
        lines.append(
            f"this client was {figures['client_lag_p95_ms']:.0f} ms late (95th percentile), which the figures include: "
            "run fewer streams from this machine, or stop other work on it"
        )
    return lines


# --- tables of several runs ------------------------------------------------------------------------------------------


def markdown_tables(rows: Sequence[Figures], label: str) -> str:
    """Returns the tables of upstream's DiT page, and those of playback and stages. label: title of the first column."""
    percentiles = [f"{share}th Percentile (ms)" for share in PERCENTILES]
    keys = ["mean", *(f"p{share}" for share in PERCENTILES)]
    parts = [
        "#### Total Request Latency\n",
        table(
            [label, "RTF", "Average (ms)", *percentiles],
            [[row["label"], _number(row["rtf"], 4), *_values(row["total_ms"], keys)] for row in rows],
        ),
        "\n#### First Chunk Latency\n",
        table(
            [label, "Average (ms)", *percentiles],
            [[row["label"], *_values(row["first_chunk_ms"], keys)] for row in rows],
        ),
        "\n#### First Audible Sample\n",
        table(
            [label, "Average (ms)", *percentiles, "Inaudible"],
            [[row["label"], *_values(row["audible_ms"], keys), row["inaudible"]] for row in rows],
        ),
        "\n#### Playback and Throughput\n",
        table(
            [
                label,
                "Requests",
                "Errors",
                "Refused",
                "Not Sent",
                "Without a Gap",
                "Worst Gap (ms)",
                "Without a Gap, No Buffer",
                "Peak in Flight",
                "Later Chunks p95 (ms)",
            ]
            + ["Requests per Second", "Audio Seconds per Second"],
            [
                [
                    *(row["label"], row["requests"], row["errors"], row["refused"], row["unsent"]),
                    _percent(row["share_without_gap"]),
                    _number(row["worst_gap_ms"], 0),
                    _percent(row["unbuffered_share_without_gap"]),
                    row["peak_in_flight"],
                    *_values(row["later_chunk_ms"], ["p95"]),
                    _number(row["requests_per_second"], 2),
                    _number(row["rtf"] and 1 / row["rtf"], 1),
                ]
                for row in rows
            ],
        ),
    ]
    if any(row["refused"] for row in rows):
        parts += [
            "\n#### Refusals: Time until the Answer (ms)\n",
            table(
                [
                    label,
                    "Refused",
                    "50th Percentile (ms)",
                    "95th Percentile (ms)",
                    "Longest (ms)",
                    "By token2wav's Limit",
                ],
                [
                    [row["label"], row["refused"], *_values(row["refusal_ms"], ["p50", "p95", "max"]), _limits(row)]
                    for row in rows
                ],
            ),
        ]
    if any(len(row["minutes"]) > 1 for row in rows):
        memory = list(dict.fromkeys(name for row in rows for minute in row["minutes"] for name in minute["memory"]))
        parts += [
            "\n#### Minute by Minute\n",
            table(
                [label, "Minute", "Requests", "Errors", "Refused", "Cancelled", "Without a Gap"]
                + ["Audible p50 (ms)", "Audible p95 (ms)", *(f"{name} (GiB)" for name in memory)],
                [
                    [row["label"], number, *(minute[key] for key in ("requests", "errors", "refused", "cancelled"))]
                    + [_percent(minute["share_without_gap"]), *_values(minute["audible_ms"], ["p50", "p95"])]
                    + [_number(minute["memory"].get(name, 0.0) / GIB, 2) for name in memory]
                    for row in rows
                    for number, minute in enumerate(row["minutes"], 1)
                ],
            ),
        ]
    if any(row["vocoder"] for row in rows):
        parts += [
            "\n#### token2wav: Wait for a Batch, Size of a Batch\n",
            table(
                [label, "Mean Wait of a Chunk (ms)", "Mean Batch"],
                [[row["label"], *_values(row["vocoder"], ["mean_wait_ms", "mean_batch"])] for row in rows],
            ),
        ]
    if stages := stage_names(rows):
        parts += [
            "\n#### Where the First Chunk's Time Goes, Mean / 95th Percentile (ms)\n",
            table(
                [label, *(STAGES[name].long for name in stages)],
                [[row["label"], *(_stage(row["stages_ms"].get(name)) for name in stages)] for row in rows],
            ),
        ]
    return "\n".join(parts) + "\n"


def disaggregated_table(rows: Sequence[Figures], gpus: int) -> str:
    """Returns the table of upstream's page on disaggregated serving."""
    keys = ["mean", "p50", "p90", "p99"]
    return table(
        ["token2wav_num_gpu", "concurrent_task_per_instance", "concurrent_tasks_per_gpu"]
        + ["avg (ms)", "p50 (ms)", "p90 (ms)", "p99 (ms)"],
        [
            [gpus, row["concurrent_task_per_instance"], f"{row['concurrent_tasks_per_gpu']:.2f}"]
            + _values(row["first_chunk_ms"], keys)
            for row in rows
        ],
    )


def stage_names(rows: Sequence[Figures]) -> list[str]:
    reported = {name for row in rows for name in row["stages_ms"]}
    return [name for name in STAGES if name in reported]


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Returns a Markdown table. Cells of type float have four digits; None is an empty cell."""
    lines = [[_cell(cell) for cell in line] for line in (head, *rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _values(values: Mapping[str, float] | None, keys: Sequence[str]) -> list[str]:
    return [_number(values[key] if values else None, 2) for key in keys]


def _limits(row: Figures) -> str:
    """Returns how many each of token2wav's limits refused, if its counters were read."""
    return ", ".join(f"{limit} {count}" for limit, count in ((row["vocoder"] or {}).get("refused") or {}).items())


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _stage(values: Mapping[str, float] | None) -> str:
    return "" if values is None else f"{values['mean']:.1f} / {values['p95']:.1f}"
