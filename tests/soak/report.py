"""What a soak has found, as Markdown and JSON."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from cosyvoice_triton.load.report import table

from tests.soak.ledger import OUTCOMES
from tests.soak.runner import SoakResult


def markdown(result: SoakResult, conditions: Sequence[str]) -> str:
    """Return the report. conditions: lines about command, commit and machine."""
    problems = result.problems()
    verdict = f"**{len(problems)} problems**" if problems else "No loss, no hang, no growth."
    judged = len({growth.pid for growth in result.growths})  # the others lived too short a time
    settings = result.settings
    parts = [
        f"{verdict} {len(result.ledger.requests)} requests in {(result.seconds - result.loaded) / 60:.1f} minutes, "
        f"{settings.tasks} at a time, seed {settings.seed}, {len(result.faults)} faults, "
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
