"""Streaming and offline client over gRPC: one request, or many at once with their latencies measured.

One request writes one wav file:

    cosyvoice-triton client-grpc --target-text "Hello." --reference-audio voice.wav --reference-text "What it says."

With a manifest, a data set, --num-tasks, --num-requests, --request-rate or --log-dir it measures and writes audio
files, rtf-<split>.txt, stats_summary-<split>.txt, summary.json and summary.png to --log-dir (default ./tmp). The exit
code is 1 if any request failed.

    cosyvoice-triton client-grpc --manifest-path manifest.jsonl --num-tasks 4 --num-requests 40
    cosyvoice-triton client-grpc --huggingface-dataset yuekai/seed_tts --split-name test_zh --num-tasks 8

`--mode streaming` needs a model served for streaming (`cosyvoice-triton serve`), `--mode offline` one served for
offline requests (`cosyvoice-triton serve --offline`).
"""

import argparse
from pathlib import Path

from cosyvoice_triton.cli.arguments import positive_int
from cosyvoice_triton.cli.upstream import accept_upstream_options
from cosyvoice_triton.client.requests import add_request_arguments, positive_number
from cosyvoice_triton.constants import GRPC_PORT
from cosyvoice_triton.load.command import exit_code
from cosyvoice_triton.load.jobs import add_job_arguments
from cosyvoice_triton.load.plan import add_load_arguments
from cosyvoice_triton.load.requesting import run


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_code(lambda: run(args), output_option="--log-dir", interrupted="interrupted; the request was cancelled")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--server-addr", default="localhost", help="default: %(default)s")
    parser.add_argument("--server-port", type=int, default=GRPC_PORT, help="of Triton's gRPC (default: %(default)s)")
    parser.add_argument("--mode", choices=("streaming", "offline"), default="streaming")
    add_request_arguments(parser)
    add_job_arguments(parser)
    load = add_load_arguments(parser)
    load.add_argument("--num-tasks", type=positive_int, default=1, help="concurrent requests (default: 1)")
    load.add_argument(
        "--request-rate", type=positive_number, help="random requests per second (Poisson), instead of tasks"
    )
    load.add_argument("--log-dir", type=Path, help="directory for audio, figures and plots (default: tmp)")
    accept_upstream_options(parser, "client_grpc")
    return parser.parse_args(argv)
