"""Measure running servers under load; write tables, figures and a plot.

    cosyvoice-triton bench load --concurrency 1 4 16 --title "2 CPU cores, demo checkpoint"
    cosyvoice-triton bench load --listeners 1 10 32
    cosyvoice-triton bench load --request-rates 0.5 1 2 --manifest-path manifest.jsonl

Writes OUTPUT.md, OUTPUT.json and OUTPUT.png. The default texts and voices are those of the package's samples.
The load can be spread over several servers, such as token2wav instances on separate GPUs that share one LLM:

    cosyvoice-triton bench load --server localhost:18001 localhost:18003 --token2wav-gpus 2 --llm-gpus 1

`--concurrency` is per server; concurrent_tasks_per_gpu = concurrency * servers / (token2wav GPUs + LLM GPUs).
docs/clients.md defines each figure.
"""

import argparse
import json
import logging
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cosyvoice_triton import samples
from cosyvoice_triton.arguments import command_parser, natural_int, positive_int, positive_number, reporting_errors
from cosyvoice_triton.client.arguments import add_voice_arguments
from cosyvoice_triton.constants import GRPC_PORT
from cosyvoice_triton.load.doors import Door, SpeakerDoor
from cosyvoice_triton.load.measure import Run, host_ms
from cosyvoice_triton.load.plan import Jobs, Load, add_job_arguments
from cosyvoice_triton.load.report import disaggregated_table, markdown_tables, plot_sweep
from cosyvoice_triton.load.runner import measured

REQUESTS_PER_TASK = 4  # with fewer, start-up and tail dominate the run
MIN_REQUESTS = 40  # with fewer, the 95th percentile is the second worst value


def row_of(load: Load, run: Run, gpus: int) -> dict[str, Any]:
    """Return the figures of a run, with the swept number as `label`."""
    row = {"label": load.tasks if load.rate is None else load.rate, **load.settings(), **run.figures()}
    row["failures"] = sorted({outcome.error for outcome in run.failed})
    if load.rate is None:
        row["concurrent_task_per_instance"] = load.tasks // len(load.servers)
        row["concurrent_tasks_per_gpu"] = load.tasks / gpus
    return row


def write(output: Path, about: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write OUTPUT.md, .json and .png."""
    output.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps({**about, "rows": rows}, indent=1, ensure_ascii=False)
    with_suffix(output, ".json").write_text(content, encoding="utf-8")
    with_suffix(output, ".md").write_text(markdown(about, rows), encoding="utf-8")
    plot_sweep(rows, about["label"].lower(), about["title"], with_suffix(output, ".png"))


def markdown(about: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    settings = rows[0]
    head = [
        f"{about['title'] or 'Benchmark'}: {settings['model']}, {settings['mode']}, {len(settings['servers'])} "
        f"server(s). Made {about['made']}, the client on {about['client_machine']}.",
        f"\n`{about['command']}`\n",
        f"The warm-up ({settings['warmup_requests']} requests for the first row) is not counted. A gap is an "
        f"underrun of a player that starts {settings['player_buffer_ms']:.0f} ms after the first chunk.\n",
    ]
    parts = [*head, markdown_tables(rows, about["label"])]
    if "concurrent_tasks_per_gpu" in settings and (about["llm_gpus"] or len(settings["servers"]) > 1):
        table = disaggregated_table(rows, about["token2wav_gpus"])
        parts += ["#### Disaggregated Server, First Chunk Latency\n", table]
    if failures := sorted({error for row in rows for error in row["failures"]}):
        parts += ["\nErrors:\n", *(f"- {error}" for error in failures)]
    return "\n".join(parts).rstrip() + "\n"


def with_suffix(output: Path, suffix: str) -> Path:
    """Return `output` with a suffix appended; a name such as run-0.5 keeps its dot."""
    return output.with_name(output.name + suffix)


@reporting_errors("interrupted before there was anything to report")
def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    args = parse_args(argv)
    with ExitStack() as stack:
        doors = {server: _speaker_door(server, stack) for server in args.servers if Path(server).is_dir()}
        return sweep(args, sys.argv[1:] if argv is None else argv, doors)


def _speaker_door(models: str, stack: ExitStack) -> SpeakerDoor:
    from cosyvoice_triton.speaker.speaker import Speaker  # here, because a client does not need torch

    return SpeakerDoor(stack.enter_context(Speaker(models)))


def sweep(args: argparse.Namespace, command: list[str], doors: Mapping[str, Door]) -> int:
    """Measure until a step is aborted; return 0 if every request of every step was answered."""
    if not (args.manifest_path or args.huggingface_dataset or args.target_text):
        args.manifest_path = samples.MANIFEST
    jobs = Jobs.from_arguments(args)
    servers = len(args.servers)
    steps: list[tuple[float | None, int]] = [(rate, servers) for rate in args.request_rates or ()]
    steps = steps or [(None, tasks * servers) for tasks in args.listeners or args.concurrency]
    about = {
        "title": args.title,
        "command": shlex.join(["cosyvoice-triton", "bench", "load", *command]),
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "client_machine": f"{platform.platform()}, Python {platform.python_version()}, host {host_ms():.1f} ms",
        "label": "Requests per Second" if args.request_rates else "Listeners" if args.listeners else "Concurrent Tasks",
        "token2wav_gpus": args.token2wav_gpus,
        "llm_gpus": args.llm_gpus,
    }
    rows: list[dict[str, Any]] = []
    code = 0
    for rate, tasks in steps:
        count = args.num_requests or max(len(jobs), MIN_REQUESTS, REQUESTS_PER_TASK * tasks)
        if rate and args.duration:
            count = max(1, round(rate * args.duration))
        load = jobs.load(args, count, tasks, servers=args.servers, rate=rate, listening=bool(args.listeners))
        run = measured(load, load.shape(), doors)
        rows.append(row_of(load, run, args.token2wav_gpus + args.llm_gpus))
        write(args.output, about, rows)  # after each step, so that an aborted sweep keeps its results
        code = code or (0 if run.complete else 1)
        if run.interrupted or len(run.lost) == len(args.servers):
            code = 130 if run.interrupted else 1
            break
    print(markdown(about, rows))
    print(f"written to {args.output}.md, .json and .png")
    return code


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.add_argument(
        "--server",
        dest="servers",
        nargs="+",
        default=[f"localhost:{GRPC_PORT}"],
        metavar="ADDRESS",
        help="HOST:PORT of gRPC; the URL of a speech service, http://localhost:10086 for raw PCM over HTTP, ws:// for "
        "its WebSocket; or a folder of checkpoints, which speak in this process",
    )
    parser.add_argument("--mode", choices=("streaming", "offline"), default="streaming")
    add_voice_arguments(parser)
    load = add_job_arguments(parser)
    sweep = load.add_mutually_exclusive_group()
    sweep.add_argument("--concurrency", type=positive_int, nargs="+", default=[1, 2, 4], help="tasks per server")
    sweep.add_argument(
        "--listeners",
        type=positive_int,
        nargs="+",
        help="tasks per server that wait until their audio has been played before the next request, as people do",
    )
    sweep.add_argument(
        "--request-rates",
        "--open-loop",
        type=positive_number,
        nargs="+",
        help="open loop: random requests per second (Poisson), over all servers, whether they are answered or not",
    )
    load.add_argument(
        "--duration", type=positive_number, help="seconds at each rate of --request-rates, instead of --num-requests"
    )
    load.add_argument("--token2wav-gpus", type=positive_int, default=1, help="GPUs used by the servers")
    load.add_argument(
        "--llm-gpus", type=natural_int, default=0, help="GPUs used only by the LLM; 0: it shares the others"
    )
    report = parser.add_argument_group("report")
    report.add_argument("--title", default="", help="what was measured: machine, weights, server settings")
    report.add_argument("--output", type=Path, default=Path("out/benchmark"), help="path without suffix")
    args = parser.parse_args(argv)
    if args.duration and not args.request_rates:
        parser.error("--duration: seconds at each rate of --request-rates, which is missing")
    return args
