"""Print the segments of the held texts (tests/assets/text_cases.json) as the table of docs/results/quality.md.

python -m tests.text.table                      the segments of this checkout
python -m tests.text.table --write              store them in the file, for the tests
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cosyvoice_triton.text import TextFrontend, clean_text
from cosyvoice_triton.text.duration import expected_seconds

CASES = Path(__file__).resolve().parents[1] / "assets" / "text_cases.json"


def cases() -> list[dict[str, Any]]:
    """name, text, and under `segments` [text, expected seconds] of each segment."""
    return list(json.loads(CASES.read_text(encoding="utf-8")))


def segments_of(text: str) -> list[tuple[str, float]]:
    found = TextFrontend().segments(clean_text(text, name="text", max_chars=4096))
    return [(segment, round(expected_seconds(segment), 2)) for segment in found]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(argv)
    held = [case | {"segments": segments_of(case["text"])} for case in cases()]
    if args.write:
        CASES.write_text(json.dumps(held, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    for case in held:
        segments = ", ".join(f"{len(text)} ({seconds:.1f} s)" for text, seconds in case["segments"])
        sys.stdout.write(f"| {case['name']} | {len(case['text'])} | {segments} |\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
