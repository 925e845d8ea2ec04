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

import numpy as np
from cosyvoice_triton import samples
from cosyvoice_triton.arguments import natural_int, positive_number
from cosyvoice_triton.client.failures import ClientError
from cosyvoice_triton.demo_checkpoint import DEMO
from cosyvoice_triton.load.report import table
from cosyvoice_triton.load.samples import read_manifest
from cosyvoice_triton.prepare import steps

from tests.soak.faults import KINDS
from tests.soak.ledger import OUTCOMES
from tests.soak.runner import TASKS, SoakResult, SoakSettings, soak

REPOSITORY = Path(__file__).resolve().parents[2]


def markdown(result: SoakResult, conditions: Sequence[str]) -> str:
    """Return the report. conditions: lines about command, commit and machine."""
    problems = result.problems()
    verdict = f"**{len(problems)} problems**" if problems else "No loss, no hang, no growth."
    judged = len({growth.pid for growth in result.growths})  # the others lived too short a time
    settings = result.settings
    parts = [
        f"{verdict} {len(result.ledger.requests)} requests in {(result.seconds - result.loaded) / 60:.1f} minutes, "
        f"{TASKS} at a time, seed {settings.seed}, {len(result.faults)} faults, "
        f"{judged} processes judged for growth" + (", interrupted.\n" if result.interrupted else ".\n"),
        *conditions,
        "\n## Problems\n" if problems else "",
        *(f"- {line}" for line in problems),
        "\n## Requests\n",
        _requests(result),
        "\n## Faults\n",
        _faults(result),
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _requests(result: SoakResult) -> str:
    rows, requests = [], result.ledger.requests
    for route in (*sorted({request.route for request in requests}), "all"):
        chosen = [request for request in requests if route in (request.route, "all")]
        firsts = [1000 * request.answer.arrivals[0] for request in chosen if request.answer.arrivals]
        p50, p95 = (f"{value:.0f}" for value in np.percentile(firsts, (50, 95))) if firsts else ("", "")
        counts = Counter(request.outcome for request in chosen)
        rows.append([route, len(chosen), *(counts[outcome] or "" for outcome in OUTCOMES), p50, p95])
    return table(["route", "requests", *OUTCOMES, "first audio p50 (ms)", "p95"], rows)


def _faults(result: SoakResult) -> str:
    rows = []
    for fault in result.faults:
        failed = sum(request.fault == fault.name for request in result.ledger.requests)
        ended = next((life for life in result.lives if life.fault == fault.name), None)
        words = "" if ended is None else f"{ended.service}: {ended.last_words[:160] if ended.code == 1 else 'killed'}"
        lasted = "" if fault.ended is None else f"{fault.ended - fault.begun:.0f}"
        rows.append([fault.name, f"{fault.begun:.0f}", lasted, failed or "", words, fault.note])
    return table(["fault", "at (s)", "until all is ready (s)", "requests failed", "ended", "note"], rows)


def write(result: SoakResult, output: Path, conditions: Sequence[str]) -> str:
    """Write OUTPUT.md and OUTPUT.json; return the Markdown."""
    output.parent.mkdir(parents=True, exist_ok=True)
    text = markdown(result, conditions)
    output.with_name(f"{output.name}.md").write_text(text, encoding="utf-8")
    content = {
        "conditions": list(conditions),
        "loaded": result.loaded,
        "ended": result.seconds,
        "problems": result.problems(),
        "requests": [vars(each) | {"answer": each.answer.as_json()} for each in result.ledger.requests],
        "faults": [vars(fault) | {"kind": fault.kind.name, "name": fault.name} for fault in result.faults],
        "lives": [vars(life) for life in result.lives],
        "processes": [vars(process) for process in result.processes],
        "growth": [vars(growth) | {"grows": growth.grows} for growth in result.growths],
    }
    output.with_name(f"{output.name}.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return text


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    command = shlex.join(["python", "-m", "tests.soak", *(sys.argv[1:] if argv is None else argv)])
    try:
        if args.models is None:
            steps.demo(DEMO)
        work = args.output.with_name(f"{args.output.name}.files").resolve()
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        settings = SoakSettings(
            minutes=args.minutes,
            seed=args.seed,
            faults=not args.no_faults,
            chosen=[KINDS[name] for name in args.faults],
            models=args.models or DEMO,
            work=work,
        )
        print("starting the servers ...", file=sys.stderr, flush=True)
        result = asyncio.run(soak(settings, read_manifest(samples.MANIFEST)))
    except (ClientError, RuntimeError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        print("soak interrupted: there is no report; its servers have ended", file=sys.stderr)
        return 130
    print(write(result, args.output, [f"`{command}`\n", conditions()]))
    problems = len(result.problems())
    verdict = "interrupted" if result.interrupted else "failed" if problems else "passed"
    counts = ", ".join(f"{count} {outcome}" for outcome, count in result.ledger.counts().most_common())
    print(f"soak {verdict}: {problems} problems; {counts}; written to {args.output}.md and .json")
    return 130 if result.interrupted else 1 if problems else 0


def conditions() -> str:
    """Return commit and machine."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return (
        f"Commit {described.stdout.strip() or 'unknown'}, {time.strftime('%Y-%m-%d %H:%M')}, "
        f"{os.cpu_count()} CPU cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}."
    )


if __name__ == "__main__":
    sys.exit(main())
