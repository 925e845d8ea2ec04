"""Print the segments of the held texts (tests/assets/text_cases.json) as the table of docs/results/quality.md.

python -m tests.text.table                      the segments of this checkout
python -m tests.text.table --before CHECKOUT    and those of an older one, which counted LLM tokens
python -m tests.text.table --write              store the segments of this checkout in the file, for the tests
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cosyvoice_triton.text import TextFrontend, clean_text
from cosyvoice_triton.text.duration import expected_seconds

CASES = Path(__file__).resolve().parents[1] / "assets" / "text_cases.json"

# Run in the older checkout: the paths of a tokenizer and of the cases -> a list of segments for each case.
OLD = """
import json, sys
from tokenizers import Tokenizer
from cosyvoice_triton.text import TextFrontend, clean_text
tokenizer = Tokenizer.from_file(sys.argv[1])
frontend = TextFrontend(lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids))
texts = [clean_text(case["text"], name="text", max_chars=4096) for case in json.load(open(sys.argv[2]))]
print(json.dumps([list(frontend.segments(text)) for text in texts]))
"""


def cases() -> list[dict[str, Any]]:
    """name, text, and under `segments` [text, expected seconds] of each segment."""
    return list(json.loads(CASES.read_text(encoding="utf-8")))


def segments_of(text: str) -> list[tuple[str, float]]:
    found = TextFrontend().segments(clean_text(text, name="text", max_chars=4096))
    return [(segment, round(expected_seconds(segment), 2)) for segment in found]


def before(checkout: Path) -> list[list[tuple[str, float]]]:
    from tests.support.qwen_vocabulary import qwen2_tokenizer

    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        qwen2_tokenizer().save(file.name)
        command = [sys.executable, "-c", OLD, file.name, str(CASES)]
        output = subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True).stdout
    return [[(segment, expected_seconds(segment)) for segment in found] for found in json.loads(output)]


def shown(segments: Sequence[tuple[str, float]]) -> str:
    """The characters and expected seconds of each segment."""
    return ", ".join(f"{len(text)} ({seconds:.1f} s)" for text, seconds in segments)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(argv)
    held = cases()
    now = [segments_of(case["text"]) for case in held]
    if args.write:
        content = [case | {"segments": segments} for case, segments in zip(held, now, strict=True)]
        CASES.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    columns = [before(args.before.resolve()), now] if args.before else [now]
    for case, *rows in zip(held, *columns, strict=True):
        sys.stdout.write("| " + " | ".join([case["name"], str(len(case["text"])), *map(shown, rows)]) + " |\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
