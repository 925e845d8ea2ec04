"""A sweep over concurrency, listeners or request rates of one or several servers: tables, figures and a picture.

    python scripts/benchmark.py --concurrency 1 4 16 --title "2 CPU cores, demo checkpoint, random weights"
    python scripts/benchmark.py --listeners 1 10 32
    python scripts/benchmark.py --request-rates 0.5 1 2 --manifest-path tests/assets/manifest.jsonl
    python scripts/benchmark.py --compare out/before.json out/after.json --output out/comparison

Writes OUTPUT.md, OUTPUT.json and OUTPUT.png. Without data it speaks the sentences of tests/assets/manifest.jsonl.
Several servers, such as token2wav instances on GPUs of their own beside one LLM, share the load:

    python scripts/benchmark.py --servers localhost:18001 localhost:18003 --token2wav-gpus 2 --llm-gpus 1

`--concurrency` is per server; concurrent_tasks_per_gpu = concurrency * servers / (token2wav GPUs + LLM GPUs).
docs/benchmark.md says what each figure includes.
"""

import argparse
import logging
import platform
import shlex
import sys
import time
from pathlib import Path

from common.client.requests import ClientError, add_voice_arguments, positive_number
from tools.load.jobs import Jobs, add_job_arguments, natural_int, positive_int
from tools.load.plan import Load, add_load_arguments
from tools.load.progress import measured
from tools.load.samples import SampleError
from tools.load.sweep import Sweep, write_comparison

MANIFEST = Path(__file__).resolve().parents[1] / "tests" / "assets" / "manifest.jsonl"
REQUESTS_PER_TASK = 4  # with fewer, the beginning and the end of a run are all of it
MIN_REQUESTS = 40  # with fewer, a 95th percentile is the worst but one


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        if args.compare:
            print(write_comparison([Sweep.read(path) for path in args.compare], args.output))
            return 0
        return run_sweep(args, sys.argv[1:] if argv is None else argv)
    except (ClientError, SampleError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: cannot write the report: {error}; choose another place with --output", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted before there was anything to report", file=sys.stderr)
        return 130


def run_sweep(args: argparse.Namespace, command: list[str]) -> int:
    """Measure step after step, until one is broken off; 0 when every request of every step was answered."""
    if not (args.manifest_path or args.huggingface_dataset or args.target_text):
        args.manifest_path = MANIFEST
    jobs = Jobs.from_arguments(args)
    servers = len(args.servers)
    steps: list[tuple[float | None, int]] = [(rate, servers) for rate in args.request_rates or ()]
    steps = steps or [(None, tasks * servers) for tasks in args.listeners or args.concurrency]
    sweep = Sweep(
        title=args.title,
        command=shlex.join(["python", "scripts/benchmark.py", *command]),
        made=time.strftime("%Y-%m-%d %H:%M"),
        client_machine=f"{platform.platform()}, Python {platform.python_version()}",
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
        sweep.write(args.output)  # after each step: what is measured is safe
        code = code or (0 if run.complete else 1)
        if run.interrupted or len(run.lost) == len(args.servers):
            code = 130 if run.interrupted else 1
            break
    print(sweep.markdown())
    print(f"written to {args.output}.md, .json and .png")
    return code


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--servers", nargs="+", default=["localhost:8001"], metavar="HOST:PORT", help="of gRPC")
    parser.add_argument("--mode", choices=("streaming", "offline"), default="streaming")
    add_voice_arguments(parser)
    add_job_arguments(parser)
    load = add_load_arguments(parser)
    sweep = load.add_mutually_exclusive_group()
    sweep.add_argument("--concurrency", type=positive_int, nargs="+", default=[1, 2, 4], help="tasks of each server")
    sweep.add_argument(
        "--listeners",
        type=positive_int,
        nargs="+",
        help="tasks of each server that hear each answer to its end before they ask anew, as people do",
    )
    sweep.add_argument(
        "--request-rates", type=positive_number, nargs="+", help="requests per second at random, of all servers"
    )
    load.add_argument("--token2wav-gpus", type=positive_int, default=1, help="GPUs that the servers are on")
    load.add_argument("--llm-gpus", type=natural_int, default=0, help="GPUs of the LLM alone; 0: it shares the others")
    report = parser.add_argument_group("report")
    report.add_argument("--title", default="", help="what was measured: machine, weights, settings of the server")
    report.add_argument("--output", type=Path, default=Path("out/benchmark"), help="path without a suffix")
    report.add_argument("--compare", type=Path, nargs=2, metavar="JSON", help="draw two sweeps side by side instead")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
