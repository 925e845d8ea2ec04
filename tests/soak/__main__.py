"""Keep a stack under mixed load and faults, and account for every request: exit code 1 on a loss, a hang or growth.

    make soak MINUTES=10                             the same as the next line
    python -m tests.soak --minutes 10                a stack of its own on the demo checkpoint, with faults
    python -m tests.soak --minutes 60 --no-faults    the same without faults

Load: gRPC streamed and offline, the OpenAI-style route in any format, the WebSocket with barge-in, the plain runtime's
gRPC service, voices that are registered, used and deleted, and Envoy before them. 10 % of the requests are cancelled,
5 % are bad in one of several ways, each of which has the error that must be the answer.

Faults: processes killed and stopped, and those of monitoring/faults.py inside the models; a service that ends is
started again, as compose and Kubernetes do. In the last half of the time nothing is killed, so that growth can be
judged.

Each request ends exactly once: done; cancelled; rejected (bad input, as expected); refused (the server is full and
says so); failed (an error that one of the injected faults explains). Anything else is lost, and a request without any
part of its answer for a minute has hung. The requests are the same for the same --seed, though their times
are not.

Writes OUTPUT.md, OUTPUT.json (every request and sample) and the servers' logs to OUTPUT.files/. It needs two CPU cores,
4 GB of memory and one or two minutes more than --minutes, ten if the servers hang. docs/clients.md explains the
figures.
"""

import argparse
import asyncio
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cosyvoice_triton import samples
from cosyvoice_triton.arguments import command_parser, natural_int, positive_number, reporting_errors
from cosyvoice_triton.bench.load import with_suffix
from cosyvoice_triton.demo_checkpoint import DEMO
from cosyvoice_triton.load.measure import distribution
from cosyvoice_triton.load.report import table
from cosyvoice_triton.load.samples import read_manifest
from cosyvoice_triton.prepare import steps

from tests.soak.faults import KINDS
from tests.soak.outcomes import OUTCOMES, Settled
from tests.soak.runner import TASKS, SoakResult, soak

REPOSITORY = Path(__file__).resolve().parents[2]


def markdown(result: SoakResult, conditions: Sequence[str]) -> str:
    """Return the report. conditions: lines about command, commit and machine."""
    problems = result.problems()
    verdict = f"**{len(problems)} problems**" if problems else "No loss, no hang, no growth."
    judged = len({growth.pid for growth in result.growths})  # the others lived too short a time
    parts = [
        f"{verdict} {len(result.requests)} requests in {(result.seconds - result.loaded) / 60:.1f} minutes, "
        f"{TASKS} at a time, {len(result.faults)} faults, "
        f"{judged} processes judged for growth" + (", interrupted.\n" if result.interrupted else ".\n"),
        *conditions,
        "\n## Problems\n" if problems else "",
        *(f"- {line}" for line in problems),
        "\n## Requests\n",
        _requests(result.requests),
        "\n## Faults\n",
        _faults(result),
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _requests(requests: Sequence[Settled]) -> str:
    rows = []
    for route in (*sorted({request.answer.server for request in requests}), "all"):
        chosen = [request for request in requests if route in (request.answer.server, "all")]
        firsts = distribution(request.answer.arrivals[0] for request in chosen if request.answer.arrivals)
        shares = [f"{firsts[share]:.0f}" if firsts else "" for share in ("p50", "p95")]
        counts = Counter(request.outcome for request in chosen)
        rows.append([route, len(chosen), *(counts[outcome] or "" for outcome in OUTCOMES), *shares])
    return table(["route", "requests", *OUTCOMES, "first audio p50 (ms)", "p95"], rows)


def _faults(result: SoakResult) -> str:
    rows = []
    for fault in result.faults:
        failed = sum(request.fault == fault.name for request in result.requests)
        ended = next((life for life in result.lives if life.fault == fault.name), None)
        words = "" if ended is None else f"{ended.service}: {ended.last_words[:160] if ended.code == 1 else 'killed'}"
        lasted = "" if fault.ended is None else f"{fault.ended - fault.begun:.0f}"
        rows.append([fault.name, f"{fault.begun:.0f}", lasted, failed or "", words, fault.note])
    return table(["fault", "at (s)", "until all is ready (s)", "requests failed", "ended", "note"], rows)


def as_json(result: SoakResult, conditions: Sequence[str]) -> dict[str, Any]:
    """Return all that was seen, JSON-ready."""
    return {
        "conditions": list(conditions),
        "loaded": result.loaded,
        "ended": result.seconds,
        "problems": result.problems(),
        "requests": [vars(each) | {"answer": each.answer.as_json()} for each in result.requests],
        "faults": [vars(fault) | {"kind": fault.kind.name, "name": fault.name} for fault in result.faults],
        "lives": [vars(life) for life in result.lives],
        "processes": [vars(process) for process in result.processes],
        "growth": [vars(growth) | {"grows": growth.grows} for growth in result.growths],
    }


@reporting_errors("interrupted: there is no report; the servers have ended")
def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.models is None:
        steps.demo(DEMO)
    work = with_suffix(args.output, ".files").resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    kinds = None if args.no_faults else [KINDS[name] for name in args.faults]
    texts, models = read_manifest(samples.MANIFEST), args.models or DEMO
    print("starting the servers ...", file=sys.stderr, flush=True)
    try:
        result = asyncio.run(soak(60 * args.minutes, args.seed, kinds, texts, models, work))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    command = shlex.join(["python", "-m", "tests.soak", *(sys.argv[1:] if argv is None else argv)])
    about = [f"`{command}`\n", conditions(args.seed)]
    text, seen = markdown(result, about), json.dumps(as_json(result, about), ensure_ascii=False)
    with_suffix(args.output, ".md").write_text(text, encoding="utf-8")
    with_suffix(args.output, ".json").write_text(seen, encoding="utf-8")
    print(text)
    problems, counts = len(result.problems()), Counter(each.outcome for each in result.requests).most_common()
    verdict = "interrupted" if result.interrupted else "failed" if problems else "passed"
    ended = ", ".join(f"{count} {outcome}" for outcome, count in counts)
    print(f"soak {verdict}: {problems} problems; {ended}; written to {args.output}.md and .json")
    return 130 if result.interrupted else 1 if problems else 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.prog = "python -m tests.soak"
    parser.add_argument("--minutes", type=positive_number, default=10.0, help="of load (10)")
    parser.add_argument("--seed", type=natural_int, default=1, help="of the requests and the faults (1)")
    injected = parser.add_mutually_exclusive_group()
    injected.add_argument("--no-faults", action="store_true", help="load alone")
    injected.add_argument(
        "--faults",
        nargs="+",
        choices=KINDS,
        default=[],
        metavar="NAME",
        help=f"these kinds in this order, quoted: {', '.join(KINDS)}",
    )
    parser.add_argument("--models", type=Path, help="a demo checkpoint; default: models/demo, made if it is not there")
    parser.add_argument("--output", type=Path, default=Path("out/soak"), help="path without suffix (out/soak)")
    return parser.parse_args(argv)


def conditions(seed: int) -> str:
    """Return the seed, the commit and the machine."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return (
        f"Seed {seed}, commit {described.stdout.strip() or 'unknown'}, {time.strftime('%Y-%m-%d %H:%M')}, "
        f"{os.cpu_count()} CPU cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}."
    )


if __name__ == "__main__":
    sys.exit(main())
