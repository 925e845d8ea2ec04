"""Streaming and offline client over gRPC: one request, or many at once with their latencies measured.

One request writes one wav file:

    cosyvoice-triton client-grpc --target-text "Hello." --reference-audio voice.wav --reference-text "What it says."

With a manifest, a data set, --num-tasks, --num-requests, --request-rate or --log-dir it measures and writes audio
files, rtf-<split>.txt, stats_summary-<split>.txt, summary.json and .png to --log-dir (default ./tmp). The exit code is
1 if any request failed.

    cosyvoice-triton client-grpc --manifest-path manifest.jsonl --num-tasks 4 --num-requests 40
    cosyvoice-triton client-grpc --huggingface-dataset yuekai/seed_tts --split-name test_zh --num-tasks 8

`--mode streaming` needs a model served for streaming (`cosyvoice-triton serve`), `--mode offline` one served for
offline requests (`cosyvoice-triton serve --offline`).
"""

import argparse
import asyncio
import logging
from pathlib import Path

from cosyvoice_triton.arguments import command_parser, positive_int, positive_number, reporting_errors
from cosyvoice_triton.cli.upstream import accept_upstream_options
from cosyvoice_triton.client.arguments import add_request_arguments, utterance_of
from cosyvoice_triton.client.grpc_client import synthesize
from cosyvoice_triton.constants import GRPC_PORT
from cosyvoice_triton.load.plan import Jobs, add_job_arguments
from cosyvoice_triton.load.report import closing_lines, markdown_tables, plot_run, write_run
from cosyvoice_triton.load.runner import measured

LOG_DIR = Path("tmp")  # upstream's


@reporting_errors("interrupted; the request was cancelled")
def main(argv: list[str] | None = None) -> int:
    """Send one request, or many if the options ask for a measurement; return the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    args = parse_args(argv)
    server = f"{args.server_addr}:{args.server_port}"
    several = args.num_tasks > 1 or (args.num_requests or 1) > 1
    data = args.manifest_path or args.huggingface_dataset or args.use_spk2info_cache
    if several or data or args.request_rate or args.log_dir:
        return measure(args, server)
    request = utterance_of(args)
    answer = asyncio.run(synthesize(server, args.model_name, request, args.mode, args.timeout))
    answer.save(args.output_audio)
    print(answer.summary())
    print(f"written to         {args.output_audio}")
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.add_argument("--server-addr", default="localhost", help="default: %(default)s")
    parser.add_argument("--server-port", type=int, default=GRPC_PORT, help="of Triton's gRPC (default: %(default)s)")
    parser.add_argument("--mode", choices=("streaming", "offline"), default="streaming")
    add_request_arguments(parser)
    load = add_job_arguments(parser)
    load.add_argument("--num-tasks", type=positive_int, default=1, help="concurrent requests (default: 1)")
    load.add_argument(
        "--request-rate", type=positive_number, help="random requests per second (Poisson), instead of tasks"
    )
    load.add_argument("--log-dir", type=Path, help="directory for audio and figures (default: tmp)")
    accept_upstream_options(parser, "client_grpc")
    return parser.parse_args(argv)


def measure(args: argparse.Namespace, server: str) -> int:
    """Send many requests; print the results and write them to the log directory."""
    jobs, directory = Jobs.from_arguments(args), args.log_dir or LOG_DIR
    count = args.num_requests or max(len(jobs), args.num_tasks)
    load = jobs.load(args, count, args.num_tasks, servers=[server], rate=args.request_rate, audio_dir=directory)
    run = measured(load, f"{load.model} {load.mode}")
    summary = write_run(run, load.settings(), jobs.split, directory)
    title = f"{load.model} at {server}, {load.mode}, {load.shape()}"
    plot_run(summary, title, directory / "summary.png")
    label = "Concurrent Tasks" if load.rate is None else "Requests per Second"
    print(markdown_tables([{**summary, "label": load.rate or load.tasks}], label))
    print("\n".join(closing_lines(summary)))
    print(f"written to {directory}: audio, rtf-{jobs.split}.txt, stats_summary-{jobs.split}.txt, summary.json and .png")
    return 130 if run.interrupted else 0 if run.complete else 1
