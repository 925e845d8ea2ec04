"""Sweep over concurrency, listeners or request rates on one or several servers; writes tables, figures and a plot.

    cosyvoice-triton bench load --concurrency 1 4 16 --title "2 CPU cores, demo checkpoint, random weights"
    cosyvoice-triton bench load --listeners 1 10 32
    cosyvoice-triton bench load --request-rates 0.5 1 2 --manifest-path manifest.jsonl
    cosyvoice-triton bench load --compare out/before.json out/after.json --output out/comparison

Writes OUTPUT.md, OUTPUT.json and OUTPUT.png. The default data are the sentences of manifest.jsonl.
The load can be spread over several servers, such as token2wav instances on separate GPUs that share one LLM:

    cosyvoice-triton bench load --servers localhost:18001 localhost:18003 --token2wav-gpus 2 --llm-gpus 1

`--concurrency` is per server; concurrent_tasks_per_gpu = concurrency * servers / (token2wav GPUs + LLM GPUs).
docs/clients.md defines each figure.
"""

import argparse
import sys
from pathlib import Path

from cosyvoice_triton.cli.arguments import natural_int, positive_int
from cosyvoice_triton.client.requests import add_voice_arguments, positive_number
from cosyvoice_triton.constants import GRPC_PORT
from cosyvoice_triton.load.benchmark import run
from cosyvoice_triton.load.command import exit_code
from cosyvoice_triton.load.jobs import add_job_arguments
from cosyvoice_triton.load.plan import add_load_arguments


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_code(
        lambda: run(args, sys.argv[1:] if argv is None else argv),
        output_option="--output",
        interrupted="interrupted before there was anything to report",
    )


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--servers", nargs="+", default=[f"localhost:{GRPC_PORT}"], metavar="HOST:PORT", help="gRPC addresses"
    )
    parser.add_argument("--mode", choices=("streaming", "offline"), default="streaming")
    add_voice_arguments(parser)
    add_job_arguments(parser)
    load = add_load_arguments(parser)
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
        type=positive_number,
        nargs="+",
        help="random requests per second (Poisson), over all servers",
    )
    load.add_argument("--token2wav-gpus", type=positive_int, default=1, help="GPUs used by the servers")
    load.add_argument(
        "--llm-gpus", type=natural_int, default=0, help="GPUs used only by the LLM; 0: it shares the others"
    )
    report = parser.add_argument_group("report")
    report.add_argument("--title", default="", help="what was measured: machine, weights, server settings")
    report.add_argument("--output", type=Path, default=Path("out/benchmark"), help="path without suffix")
    report.add_argument("--compare", type=Path, nargs=2, metavar="JSON", help="compare two sweeps instead of measuring")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
