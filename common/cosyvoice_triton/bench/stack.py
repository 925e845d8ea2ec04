"""A whole stack under load: rendered, served by a tritonserver of its own, and measured, once for each plan.

    cosyvoice-triton bench stack models/full --plans :480 --listeners 1 32 256 512 --output out/dit
    cosyvoice-triton bench stack models/full --plans 7.5:4 11.5:16 15.5:32 22.5:64
    cosyvoice-triton bench stack models/demo --plans :2 --device cpu
    cosyvoice-triton bench stack models/full --plans 7.5:4 --load='--new-voices --manifest-path voices/manifest.jsonl'

A plan is gpu_memory_gib:max_streams. One listener is one task that sends its next request when the last one is
answered; more of them wait until their audio has been played, as people do. By default there is one, then as many as
the plan has streams. The peak is that of the GPUs' memory, of all processes, as nvidia-smi shows it every 0.3 s.

Prints a line for each load and writes OUTPUT.json, a list of them with every figure of `cosyvoice-triton bench load`,
and OUTPUT_STREAMS_LISTENERS.md, .json and .png.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

from cosyvoice_triton import stacks
from cosyvoice_triton.arguments import command_parser, positive_int, reporting_errors
from cosyvoice_triton.bench import FULL_SIZE
from cosyvoice_triton.bench.load import with_suffix
from cosyvoice_triton.load.host import host_ms
from cosyvoice_triton.server import mps
from cosyvoice_triton.server.options import Device, StackOptions, parse_settings
from cosyvoice_triton.server.rendering import render
from cosyvoice_triton.server.tritonserver import Ports, TritonServer

SAMPLE_MILLISECONDS = 300


class BenchPlan(NamedTuple):
    """gib: `gpu_memory_gib`, "" to leave it unset. streams: `max_streams`."""

    gib: str
    streams: int

    @classmethod
    def read(cls, text: str) -> "BenchPlan":
        gib, separator, streams = text.partition(":")
        if not separator or not streams.isdigit() or int(streams) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not gpu_memory_gib:max_streams, such as 7.5:4 or :4")
        return cls(gib, int(streams))

    def __str__(self) -> str:
        return f"{self.gib}:{self.streams}"

    @property
    def settings(self) -> dict[str, str]:
        return {"max_streams": str(self.streams)} | ({"gpu_memory_gib": self.gib} if self.gib else {})


class PeakMemory:
    """Measures, within the block, the most memory that the GPUs of CUDA_VISIBLE_DEVICES use together.

    mib: that memory so far; None without nvidia-smi.
    """

    _process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "PeakMemory":
        query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
        if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
            query.append(f"--id={visible}")
        self._samples = tempfile.NamedTemporaryFile("w+")  # a pipe that nobody reads is full after minutes
        with suppress(FileNotFoundError):
            self._process = subprocess.Popen([*query, f"--loop-ms={SAMPLE_MILLISECONDS}"], stdout=self._samples)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._samples.close()

    @property
    def mib(self) -> int | None:
        return peak(Path(self._samples.name).read_text(encoding="utf-8"))


def peak(samples: str) -> int | None:
    """Return the largest sum over the GPUs in lines "index, MiB"; the last sample may be incomplete."""
    sums: list[int] = []
    first: str | None = None  # GPU of each sample
    for line in samples.splitlines():
        index, separator, used = line.partition(",")
        if not separator or not used.strip().isdigit():
            continue
        first = first or index
        if index == first:
            sums.append(0)
        sums[-1] += int(used)
    return max(sums, default=None)


def measure(plan: BenchPlan, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the figures of each load of a plan, as soon as they are known."""
    options = StackOptions(
        models_dir=args.models,
        stack=args.stack,
        device=args.device,
        llm_engine=args.llm_engine,
        settings=parse_settings(args.settings) | plan.settings,
    )
    print(f"plan {plan}: loading, which takes a minute or two on a GPU, then measuring", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder, PeakMemory() as memory:
        repository = Path(folder) / "repository"
        render(options, repository)
        with mps.shared_gpu(repository), TritonServer(repository, ports=Ports(0, 0, 0)) as server:
            for listeners in args.listeners or sorted({1, plan.streams}):
                output = args.output.with_name(f"{args.output.name}_{plan.streams}_{listeners}")
                row = benchmark(server, options, listeners, args.requests, args.load, output)
                yield {"stack": args.stack, "plan": str(plan), "listeners": listeners, "peak_mib": memory.mib, **row}


def benchmark(
    server: TritonServer, options: StackOptions, listeners: int, requests: int, more: Sequence[str], output: Path
) -> dict[str, Any]:
    """Measure one load, after as many requests of warm-up as there are listeners. more: further options."""
    command = [sys.executable, "-m", "cosyvoice_triton", "bench", "load", "--server", server.grpc_url]
    command += ["--model-name", stacks.named(options.stack).orchestrator, "--warmup-requests", str(listeners)]
    command += ["--concurrency" if listeners == 1 else "--listeners", str(listeners)]
    command += ["--num-requests", str(requests + (listeners if listeners > 1 else 0)), "--output", str(output)]
    subprocess.run([*command, *more], check=True, stdout=subprocess.DEVNULL)
    rows: list[dict[str, Any]] = json.loads(with_suffix(output, ".json").read_text(encoding="utf-8"))["rows"]
    return rows[0]


def line(row: dict[str, Any]) -> str:
    """Return one load as a line for people."""
    first, share, rtf = row["first_chunk_ms"], row["share_without_gap"], row["rtf"]
    parts = [
        f"{row['stack']} {row['plan']}, {row['listeners']} listener(s):",
        f"first chunk p50 {first['p50']:.1f} p95 {first['p95']:.1f} ms;" if first else "no answer;",
        f"{1 / rtf:.1f} audio-s/s;" if rtf else "",
        f"{100 * share:.1f} % without a gap;" if share is not None else "",
        f"{row['requests']} requests, {row['refused']} refused, {row['errors']} failed;",
        f"peak {row['peak_mib']} MiB" if row["peak_mib"] is not None else "",
    ]
    return " ".join(filter(None, parts)).rstrip(";")


@reporting_errors()
def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    rows: list[dict[str, Any]] = []
    print(f"host: {host_ms():.1f} ms for a fixed loop of Python", flush=True)
    for plan in args.plans:
        for row in measure(plan, args):
            rows.append(row)
            print(line(row), flush=True)
            with_suffix(args.output, ".json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.add_argument("models", type=Path, help=f"checkpoints; {FULL_SIZE}")
    parser.add_argument("--plans", type=BenchPlan.read, nargs="+", required=True, metavar="GIB:STREAMS")
    parser.add_argument("--listeners", type=positive_int, nargs="+", help="loads of each plan (1 and its streams)")
    parser.add_argument("--stack", choices=stacks.names(), default=stacks.DEFAULT.name)
    parser.add_argument("--device", choices=get_args(Device), default="gpu")
    parser.add_argument("--llm-engine", default=StackOptions.llm_engine, help="as of `cosyvoice-triton render`")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="the same")
    parser.add_argument("--requests", type=positive_int, default=16, help="of one task; more send one each besides")
    parser.add_argument(
        "--load", type=shlex.split, default=[], help="further options of `cosyvoice-triton bench load`, as one string"
    )
    parser.add_argument("--output", type=Path, default=Path("out/stack"), help="path without suffix")
    return parser.parse_args(argv)
