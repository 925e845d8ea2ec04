"""A whole stack under plans of GPU memory: first one task, then as many listeners as the plan has streams.

    python -m cosyvoice_triton.bench.stack models/full --plans 7.5:4 11.5:16 15.5:32 22.5:64 --output out/plans
    python -m cosyvoice_triton.bench.stack models/demo --plans :2 --device cpu
    python -m cosyvoice_triton.bench.stack models/full --plans 7.5:4 --set prompt_device=cpu \\
        --load='--new-voices --manifest-path voices/manifest.jsonl'

A plan is gpu_memory_gib:max_streams. For each, the stack is rendered, served by a tritonserver of its own, measured by
cosyvoice_triton.cli.benchmark and stopped. The table has the peak of the GPUs' memory, of all processes, as
nvidia-smi shows it
every 0.3 s. Where the LLM shares the GPU, start CUDA's MPS before (docs/sizing.md#gpu-memory).

Writes OUTPUT.md, and OUTPUT_N_one and OUTPUT_N_all (.md, .json, .png) of each plan with N streams.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

from cosyvoice_triton import stacks
from cosyvoice_triton.cli.arguments import positive_int
from cosyvoice_triton.cli.stack_options import parse_settings
from cosyvoice_triton.load.sweep import Sweep
from cosyvoice_triton.server.installation import ServerError
from cosyvoice_triton.server.rendering import Device, StackOptions, render
from cosyvoice_triton.server.tritonserver import Ports, TritonServer

SAMPLE_MILLISECONDS = 300
COLUMNS = (
    "plan: GiB, streams",
    "peak MiB",
    "one task, first chunk p50 / p95",
    "all listeners, first chunk p50 / p95",
    "without a gap",
    "answered",
    "refused",
)


class GpuPlan(NamedTuple):
    """gib: `gpu_memory_gib`, "" to leave it unset. streams: `max_streams`."""

    gib: str
    streams: int

    @classmethod
    def read(cls, text: str) -> "GpuPlan":
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
    """The most memory of all GPUs that CUDA_VISIBLE_DEVICES names, together, within the block, MiB; None without
    nvidia-smi."""

    mib: int | None = None
    _process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "PeakMemory":
        query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
        if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
            query.append(f"--id={visible}")
        self._samples = tempfile.TemporaryFile("w+")  # a pipe that nobody reads is full after minutes
        with suppress(FileNotFoundError):
            self._process = subprocess.Popen([*query, f"--loop-ms={SAMPLE_MILLISECONDS}"], stdout=self._samples)
        return self

    def __exit__(self, *exception: object) -> None:
        with self._samples as samples:
            if self._process is None:
                return
            self._process.terminate()
            self._process.wait()
            samples.seek(0)
            self.mib = peak(samples.read())


def peak(samples: str) -> int | None:
    """The largest sum over the GPUs in lines "index, MiB"; the last sample may be incomplete."""
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


def measure(plan: GpuPlan, options: StackOptions, requests: int, load: Sequence[str], output: Path) -> list[str]:
    """A row of the table. load: further options of cosyvoice_triton.cli.benchmark for all listeners."""
    with tempfile.TemporaryDirectory() as folder, PeakMemory() as memory:
        repository = Path(folder) / "repository"
        render(options, repository)
        with TritonServer(repository, ports=Ports(0, 0, 0)) as server:
            one, everyone = (
                benchmark(server, options, output.with_name(f"{output.name}_{plan.streams}_{name}"), arguments)
                for name, arguments in (
                    ("one", ["--concurrency", "1", "--num-requests", str(requests)]),
                    ("all", ["--listeners", str(plan.streams), "--num-requests", str(plan.streams + requests), *load]),
                )
            )
    share, answered = everyone["share_without_gap"], everyone["requests"] - everyone["refused"] - everyone["errors"]
    return [
        f"{plan.gib or 'unset'}, {plan.streams}",
        "" if memory.mib is None else str(memory.mib),
        first_chunk(one),
        first_chunk(everyone),
        "" if share is None else f"{100 * share:.1f} %",
        str(answered),
        str(everyone["refused"]),
    ]


def benchmark(server: TritonServer, options: StackOptions, output: Path, load: Sequence[str]) -> dict[str, Any]:
    """The figures of one run, which has as many requests before it as it has tasks."""
    model = stacks.named(options.stack).orchestrator
    where = ["--servers", server.grpc_url, "--model-name", model, "--warmup-requests", load[1]]
    command = [sys.executable, "-m", "cosyvoice_triton.cli.benchmark", *where, *load, "--output", str(output)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return Sweep.read(output.with_name(f"{output.name}.json")).rows[0]


def first_chunk(row: dict[str, Any]) -> str:
    found = row["first_chunk_ms"]
    return f"{found['p50']:.1f} / {found['p95']:.1f} ms" if found else ""


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    try:
        for plan in args.plans:
            options = StackOptions(
                models_dir=args.models,
                stack=args.stack,
                device=args.device,
                llm_engine=args.llm_engine,
                settings=parse_settings(args.settings) | plan.settings,
            )
            print(f"plan {plan}: loading, which takes a minute or two on a GPU, then measuring", file=sys.stderr)
            lines.append("| " + " | ".join(measure(plan, options, args.requests, args.load, args.output)) + " |")
            print(lines[-1], flush=True)
            args.output.with_name(f"{args.output.name}.md").write_text("\n".join(lines) + "\n")
    except (ValueError, OSError, ServerError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models",
        type=Path,
        help="checkpoints; `cosyvoice_triton.demo_checkpoint.make --weights random-full` has full size",
    )
    parser.add_argument("--plans", type=GpuPlan.read, nargs="+", required=True, metavar="GIB:STREAMS")
    parser.add_argument("--stack", choices=[stack.name for stack in stacks.BUILT_IN], default=stacks.DEFAULT.name)
    parser.add_argument("--device", choices=get_args(Device), default="gpu")
    parser.add_argument("--llm-engine", default=StackOptions.llm_engine, help="as of cosyvoice_triton.cli.render")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="the same")
    parser.add_argument(
        "--requests", type=positive_int, default=16, help="of one task; others have streams + this many"
    )
    parser.add_argument(
        "--load",
        type=shlex.split,
        default=[],
        help="further options of cosyvoice_triton.cli.benchmark for all listeners, as one string",
    )
    parser.add_argument("--output", type=Path, default=Path("out/plans"), help="path without suffix")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
