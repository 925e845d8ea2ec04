"""What listeners hear first, before and after leading silence is cut, under the loads of docs/results/speed.md.

    python -m tests.random_weights models/leading --weights random-full --leading-silence
    python -m tests.random_weights.first_audible models/leading --stack cosyvoice3 --output out/first_audible.json

The LLM begins with as many silent tokens as official ones, whose audio `silence.py` makes silent. Each load runs with
`trim_silence` off and on by turns, on one server. Prints a row for each run and writes all figures.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cosyvoice_triton import stacks
from cosyvoice_triton.api import Server
from cosyvoice_triton.arguments import command_parser, positive_int, reporting_errors
from cosyvoice_triton.load.report import table
from cosyvoice_triton.prepare.steps import VOICE, first_voice
from cosyvoice_triton.server.options import parse_settings
from cosyvoice_triton.server.readiness import fault
from cosyvoice_triton.server.tritonserver import free_port

from tests.random_weights import silence
from tests.support.waiting import until

TEXT = "The weather is nice today and we are going to the park. Please send the report to my office before four."
HEAD = ["load", "trim", "first audible p50", "p95", "p99", "first chunk p50", "p95", "p99"]
HEAD += ["without a gap, no buffer", "worst gap ms, no buffer", "refused", "errors", "audio-s/s"]


def row(name: str, trim: str, figures: dict[str, Any]) -> list[object]:
    """Return one run as cells of `HEAD`."""
    cells: list[object] = [name, trim]
    for key in ("audible_ms", "first_chunk_ms"):
        cells += ["" if figures[key] is None else f"{figures[key][share]:.1f}" for share in ("p50", "p95", "p99")]
    rate = figures["rtf"] and 1 / figures["rtf"]
    share, worst = figures["unbuffered_share_without_gap"], figures["unbuffered_worst_gap_ms"]
    cells += ["" if share is None else f"{100 * share:.1f} %", "" if worst is None else f"{worst:.0f}"]
    return [*cells, figures["refused"], figures["errors"], "" if not rate else f"{rate:.1f}"]


@reporting_errors()
def main(argv: list[str] | None = None) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("models", type=Path, help="random weights with --leading-silence")
    parser.add_argument("--stack", choices=stacks.names(), default=stacks.COSYVOICE3.name)
    parser.add_argument("--device", default="gpu")
    parser.add_argument("--llm-engine", default="cuda")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--listeners", type=positive_int, nargs="*", default=[1, 32, 256, 512])
    parser.add_argument(
        "--rate", type=float, default=16.0, help="requests a second of the open loop over HTTP; 0: none"
    )
    parser.add_argument("--seconds", type=positive_int, default=20, help="of each open loop")
    parser.add_argument("--rounds", type=positive_int, default=2)
    parser.add_argument("--output", type=Path, default=Path("out/first_audible.json"))
    args = parser.parse_args(argv)
    first_voice(args.models / "voices")
    found: list[dict[str, Any]] = []
    lines: list[list[object]] = []
    with tempfile.TemporaryDirectory() as folder:
        silence.register(args.stack, Path(folder))
        settings = {"min_token_ratio": "20", "max_token_ratio": "20"} | parse_settings(args.settings)
        options = {"stack": args.stack, "device": args.device, "llm_engine": args.llm_engine, "settings": settings}
        with Server(args.models, **options) as server:
            for round_ in range(args.rounds):
                for name, load in loads(args):
                    for trim in ("off", "on"):
                        figures = measured(args, server.address, load, trim)
                        found.append({"load": name, "trim": trim, "round": round_, **figures})
                        lines.append(row(name, trim, figures))
                        print(*lines[-1], sep="  ", flush=True)
                        args.output.parent.mkdir(parents=True, exist_ok=True)
                        args.output.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(table(HEAD, lines))
    return 0


def loads(args: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Return the loads by name, as options of `cosyvoice-triton bench load`."""
    found = []
    for count in args.listeners:
        kind = ["--concurrency", "1"] if count == 1 else ["--listeners", str(count)]
        requests = 40 if count == 1 else count + count // 2 + 32
        name = "1 task" if count == 1 else f"{count} listeners"
        found.append((name, [*kind, "--num-requests", str(requests), "--warmup-requests", str(count)]))
    if args.rate:
        load = ["--request-rates", str(args.rate), "--duration", str(args.seconds)]
        found.append((f"open loop, HTTP, {args.rate:g} a second", load))
    return found


def measured(args: argparse.Namespace, triton: str, load: list[str], trim: str) -> dict[str, Any]:
    """Return the figures of a load."""
    with tempfile.TemporaryDirectory() as folder:
        service, address = None, triton
        if "--request-rates" in load:
            port = free_port()
            address = f"http://127.0.0.1:{port}"
            command = ["speech", "--url", triton, "--port", str(port), "--max_streams", "1024"]
            service = subprocess.Popen([sys.executable, "-m", "cosyvoice_triton", *command])
            until(lambda: fault(f"{address}/health") is None)
        try:
            command = ["bench", "load", "--server", address, "--model-name", stacks.named(args.stack).orchestrator]
            command += ["--speaker", VOICE, "--target-text", TEXT, "--parameter", "max_tokens=212"]
            command += ["--parameter", f"trim_silence={trim}", *load, "--output", f"{folder}/run"]
            subprocess.run([sys.executable, "-m", "cosyvoice_triton", *command], stdout=subprocess.DEVNULL)
            figures: dict[str, Any] = json.loads(Path(f"{folder}/run.json").read_text(encoding="utf-8"))["rows"][0]
            return figures
        finally:
            if service is not None:
                service.terminate()
                service.wait()


if __name__ == "__main__":
    sys.exit(main())
