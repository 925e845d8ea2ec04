"""Streaming and offline client over gRPC: one request, or many at once with their latencies measured.

One request writes one wav file:

    python scripts/client_grpc.py --target-text "Hello." --reference-audio voice.wav --reference-text "What it says."

With a manifest, a data set, --num-tasks, --num-requests, --request-rate or --log-dir it measures: audio files,
rtf-<split>.txt, stats_summary-<split>.txt, summary.json and summary.png in --log-dir (default ./tmp). Exit code 1 if
any request failed.

    python scripts/client_grpc.py --manifest-path tests/assets/manifest.jsonl --num-tasks 4 --num-requests 40
    python scripts/client_grpc.py --huggingface-dataset yuekai/seed_tts --split-name test_zh --num-tasks 8

`--mode streaming` needs a model served for streaming (`make serve`), `--mode offline` one that is served for offline
requests (`make serve MODE=offline`).
"""

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from common.client import requests as speech
from common.client.grpc_client import synthesize
from tools.load.jobs import Jobs, add_job_arguments, positive_int
from tools.load.plan import Load, add_load_arguments
from tools.load.plot import plot_run
from tools.load.progress import measured
from tools.load.report import closing_lines, write_run
from tools.load.samples import SampleError

LOG_DIR = Path("tmp")  # upstream's


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        return measure(args) if is_measured(args) else ask_once(args)
    except (speech.ClientError, SampleError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: cannot write the report: {error}; choose another place with --log-dir", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; the request was cancelled", file=sys.stderr)
        return 130


def ask_once(args: argparse.Namespace) -> int:
    """One request, one file."""
    request = speech.Utterance.from_arguments(args)
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
    """Many requests, and what they gave, to the screen and into the log directory."""
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


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--server-addr", default="localhost")
    parser.add_argument("--server-port", type=int, default=8001)
    parser.add_argument("--mode", choices=("streaming", "offline"), default="streaming")
    speech.add_request_arguments(parser)
    add_job_arguments(parser)
    load = add_load_arguments(parser)
    load.add_argument("--num-tasks", type=positive_int, default=1, help="requests under way at once (default: 1)")
    load.add_argument(
        "--request-rate", type=speech.positive_number, help="requests per second at random (Poisson), instead of tasks"
    )
    load.add_argument("--log-dir", type=Path, help="where audio, figures and pictures go (default: tmp)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
