"""What a soak has found, as Markdown and JSON."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from cosyvoice_triton.load.report import table

from tests.soak.ledger import OUTCOMES
from tests.soak.runner import SoakResult
from tests.soak.sampling import JUDGED_SECONDS, LONG_SECONDS, SHORT_FACTOR, TOLERANCES, WARM_UP_SECONDS

REASONS = 12  # shown per outcome, most frequent first


def markdown(result: SoakResult, conditions: Sequence[str]) -> str:
    """Returns the report. conditions: lines about command, commit and machine."""
    problems = result.problems()
    verdict = f"**{len(problems)} problems**" if problems else "No loss, no hang, no growth."
    settings = result.settings
    parts = [
        f"{verdict} {len(result.ledger.requests)} requests in {(result.seconds - result.loaded) / 60:.1f} minutes, "
        f"{settings.tasks} at a time, seed {settings.seed}, {len(result.faults)} faults"
        + (", interrupted.\n" if result.interrupted else ".\n"),
        *conditions,
        "\n## Problems\n" if problems else "",
        *(f"- {line}" for line in problems),
        "\n## Requests\n",
        _requests(result),
        "\nReasons, with the faults that explain the errors:\n",
        *_reasons(result),
        "\n## Faults\n",
        _faults(result),
        "\n## Processes\n",
        f"Growth is judged for processes that have lived {JUDGED_SECONDS:.0f} s after a warm-up of "
        f"{WARM_UP_SECONDS:.0f} s: the last third of that time against the middle one (the minima of memory, the "
        "maxima of shared memory, otherwise the medians). Tolerated: "
        + "; ".join(f"{name} {100 * share:.0f} % or {amount:g}" for name, (share, amount) in TOLERANCES.items())
        + f", whichever is more, and {SHORT_FACTOR:g} times as much if that time is shorter than {LONG_SECONDS:.0f} s. "
        "Memory (anonymous) and shared memory are in MiB.\n",
        _growths(result),
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _requests(result: SoakResult) -> str:
    rows, requests = [], result.ledger.requests
    for route in (*sorted({request.route for request in requests}), "all"):
        chosen = [request for request in requests if route in (request.route, "all")]
        firsts = [1000 * (request.first - request.begun) for request in chosen if request.first is not None]
        p50, p95 = (f"{value:.0f}" for value in np.percentile(firsts, (50, 95))) if firsts else ("", "")
        counts = Counter(request.outcome for request in chosen)
        rows.append([route, len(chosen), *(counts[outcome] or "" for outcome in OUTCOMES), p50, p95])
    return table(["route", "requests", *OUTCOMES, "first part p50 (ms)", "p95"], rows)


def _reasons(result: SoakResult) -> list[str]:
    lines = []
    for outcome in ("refused", "failed", "rejected"):
        found = Counter(
            (request.fault.partition(" ")[2], request.reason[:160])
            for request in result.ledger.requests
            if request.outcome == outcome
        )
        for (fault, reason), count in found.most_common(REASONS):
            lines.append(f"- {outcome}, {count} times{f', {fault}' if fault else ''}: {reason}")
        if len(found) > REASONS:
            lines.append(f"- {outcome}: {len(found) - REASONS} other reasons, in the JSON file")
    return lines


def _faults(result: SoakResult) -> str:
    rows = []
    for fault in result.faults:
        failed = sum(request.fault == fault.name for request in result.ledger.requests)
        ended = next((life for life in result.lives if life.fault == fault.name), None)
        words = "" if ended is None else f"{ended.service}: {ended.last_words[:160] if ended.code == 1 else 'killed'}"
        lasted = "" if fault.ended is None else f"{fault.ended - fault.begun:.0f}"
        rows.append([fault.name, f"{fault.begun:.0f}", lasted, failed or "", words, fault.note])
    return table(["fault", "at (s)", "until all is ready (s)", "requests failed", "ended", "note"], rows)


def _growths(result: SoakResult) -> str:
    rows = [
        [each.process, each.pid, each.measure, f"{each.seconds:.0f}", f"{each.middle:.1f}", f"{each.last:.1f}"]
        + [f"{each.limit:.1f}", "**yes**" if each.grows else ""]
        for each in result.growths
        if each.middle or each.last
    ]
    if not rows:
        return "No process lived long enough to be judged: growth was not looked for."
    return table(["process", "id", "measure", "seconds", "middle third", "last third", "limit", "grows"], rows)


def write(result: SoakResult, output: Path, conditions: Sequence[str]) -> str:
    """Writes OUTPUT.md and OUTPUT.json; returns the Markdown."""
    output.parent.mkdir(parents=True, exist_ok=True)
    text = markdown(result, conditions)
    output.with_name(f"{output.name}.md").write_text(text, encoding="utf-8")
    content = {
        "conditions": list(conditions),
        "loaded": result.loaded,
        "ended": result.seconds,
        "problems": result.problems(),
        "requests": [vars(request) for request in result.ledger.requests],
        "faults": [vars(fault) | {"kind": fault.kind.name, "name": fault.name} for fault in result.faults],
        "lives": [vars(life) for life in result.lives],
        "processes": [vars(process) for process in result.processes],
        "growth": [vars(growth) | {"grows": growth.grows} for growth in result.growths],
    }
    output.with_name(f"{output.name}.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return text
