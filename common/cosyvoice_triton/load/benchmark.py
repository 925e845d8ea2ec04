"""The steps of a sweep, measured one after another; `cosyvoice-triton bench load` launches it."""

import argparse
import platform
import shlex
import time

from cosyvoice_triton import samples
from cosyvoice_triton.load.host import host_ms
from cosyvoice_triton.load.jobs import Jobs
from cosyvoice_triton.load.plan import Load
from cosyvoice_triton.load.progress import measured
from cosyvoice_triton.load.sweep import Sweep, write_comparison

REQUESTS_PER_TASK = 4  # with fewer, start-up and tail dominate the run
MIN_REQUESTS = 40  # with fewer, the 95th percentile is the second worst value


def run(args: argparse.Namespace, command: list[str]) -> int:
    """Compare two sweeps, or measure one; the exit code. command: the arguments, for the report."""
    if args.compare:
        print(write_comparison([Sweep.read(path) for path in args.compare], args.output))
        return 0
    return run_sweep(args, command)


def run_sweep(args: argparse.Namespace, command: list[str]) -> int:
    """Measure until a step is aborted; 0 if every request of every step was answered."""
    if not (args.manifest_path or args.huggingface_dataset or args.target_text):
        args.manifest_path = samples.MANIFEST
    jobs = Jobs.from_arguments(args)
    servers = len(args.servers)
    steps: list[tuple[float | None, int]] = [(rate, servers) for rate in args.request_rates or ()]
    steps = steps or [(None, tasks * servers) for tasks in args.listeners or args.concurrency]
    sweep = Sweep(
        title=args.title,
        command=shlex.join(["cosyvoice-triton", "bench", "load", *command]),
        made=time.strftime("%Y-%m-%d %H:%M"),
        client_machine=f"{platform.platform()}, Python {platform.python_version()}, host {host_ms():.1f} ms",
        label="Requests per Second" if args.request_rates else "Listeners" if args.listeners else "Concurrent Tasks",
        token2wav_gpus=args.token2wav_gpus,
        llm_gpus=args.llm_gpus,
    )
    code = 0
    for rate, tasks in steps:
        count = args.num_requests or max(len(jobs), MIN_REQUESTS, REQUESTS_PER_TASK * tasks)
        load = Load.from_arguments(args, args.servers, jobs, count, tasks, rate, None, listening=bool(args.listeners))
        run = measured(load, load.shape(), args.log_interval)
        sweep.add(load, run)
        sweep.write(args.output)  # after each step, so that an aborted sweep keeps its results
        code = code or (0 if run.complete else 1)
        if run.interrupted or len(run.lost) == len(args.servers):
            code = 130 if run.interrupted else 1
            break
    print(sweep.markdown())
    print(f"written to {args.output}.md, .json and .png")
    return code
