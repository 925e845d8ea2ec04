"""One request, or many with their latencies measured; `cosyvoice-triton client-grpc` launches it."""

import argparse
import asyncio
from pathlib import Path

from cosyvoice_triton.client.grpc_client import synthesize
from cosyvoice_triton.client.requests import Utterance
from cosyvoice_triton.load.jobs import Jobs
from cosyvoice_triton.load.plan import Load
from cosyvoice_triton.load.plot import plot_run
from cosyvoice_triton.load.progress import measured
from cosyvoice_triton.load.report import closing_lines, write_run

LOG_DIR = Path("tmp")  # upstream's


def run(args: argparse.Namespace) -> int:
    """Sends one request, or many if the options ask for a measurement; returns the exit code."""
    return measure(args) if is_measured(args) else request_once(args)


def request_once(args: argparse.Namespace) -> int:
    """Sends one request and writes one file."""
    request = Utterance.from_arguments(args)
    answer = asyncio.run(synthesize(server_of(args), args.model_name, request, args.mode, args.timeout))
    answer.save(args.output_audio)
    print(answer.summary())
    print(f"written to         {args.output_audio}")
    return 0


def is_measured(args: argparse.Namespace) -> bool:
    several = args.num_tasks > 1 or (args.num_requests or 1) > 1
    data = args.manifest_path or args.huggingface_dataset or args.use_spk2info_cache
    return bool(several or data or args.request_rate or args.log_dir)


def measure(args: argparse.Namespace) -> int:
    """Sends many requests; prints the results and writes them to the log directory."""
    jobs = Jobs.from_arguments(args)
    count = args.num_requests or max(len(jobs), args.num_tasks)
    directory = args.log_dir or LOG_DIR
    load = Load.from_arguments(args, [server_of(args)], jobs, count, args.num_tasks, args.request_rate, directory)
    run = measured(load, f"{load.model} {load.mode}", args.log_interval)
    summary = write_run(run, load.settings(), jobs.split, directory)
    print("\n".join(closing_lines(summary)))
    title = f"{load.model} at {server_of(args)}, {load.mode}, {load.shape()}"
    plot_run(summary, title, directory / "summary.png")
    print(f"written to {directory}: audio, rtf-{jobs.split}.txt, stats_summary-{jobs.split}.txt, summary.json and .png")
    return 130 if run.interrupted else 0 if run.complete else 1


def server_of(args: argparse.Namespace) -> str:
    return f"{args.server_addr}:{args.server_port}"
