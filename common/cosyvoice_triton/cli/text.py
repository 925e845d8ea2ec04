"""Print what will be spoken of a text: its segments in words, with the seconds that each is expected to take.

    cosyvoice-triton text 'It costs $1,299.'
    cosyvoice-triton text --stack cosyvoice3 --language de <letter.txt
    cosyvoice-triton text --jsonl <texts.jsonl >segments.jsonl

With --jsonl each line of the input is an object with "text", and optionally "language" and "stack" (also the name
of its model); each line of the
output has "segments" ("" for a pause), "seconds" of each, "language", and if there are any "warnings" and "left_out",
the parts that are not spoken with the reason; or "error".
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from typing import Any, TextIO

from cosyvoice_triton import stacks
from cosyvoice_triton.arguments import command_parser, reporting_errors
from cosyvoice_triton.client.arguments import words
from cosyvoice_triton.config import OrchestratorConfig
from cosyvoice_triton.text.cleaning import clean_text, control_tokens
from cosyvoice_triton.text.frontend import TextFrontend

_frontend = cache(TextFrontend)


@reporting_errors()
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("text", nargs="?", help="without it: standard input")
    parser.add_argument("--language", default="", help="zh, en, ja, ko, de, fr, es, it or ru; without it: guessed")
    parser.add_argument(
        "--stack",
        choices=stacks.names(),
        default=stacks.DEFAULT.name,
        help="they read some languages differently (default: %(default)s)",
    )
    parser.add_argument("--pronunciation", type=words, default={}, metavar="FILE", help="words = readings, a line each")
    parser.add_argument("--skip-thoughts", action="store_true", help="leave out what is in <think>...</think>")
    parser.add_argument("--jsonl", action="store_true", help="read and write JSON lines")
    args = parser.parse_args(argv)
    if args.jsonl:
        with _own_output() as output:
            for line in sys.stdin:
                if line.strip():
                    print(json.dumps(_answer(line, args), ensure_ascii=False), file=output, flush=True)
        return 0
    found = _preview(sys.stdin.read() if args.text is None else args.text, args.language, args.stack, args)
    for segment, seconds in zip(found["segments"], found["seconds"], strict=True):
        print(f"{seconds:5.1f} s  {segment or '(pause)'}")
    for each in found.get("left_out", ()):
        print(f"left out: {each['text']!r} ({each['reason']})", file=sys.stderr)
    for warning in found.get("warnings", ()):
        print(f"warning: {warning}", file=sys.stderr)
    return 0


@contextmanager
def _own_output() -> Iterator[TextIO]:
    """Yield standard output for this program alone: what libraries print goes to standard error."""
    output = sys.stdout
    try:
        number = output.fileno()
    except (OSError, ValueError):  # not a file
        with redirect_stdout(sys.stderr):
            yield output
        return
    output.flush()
    with os.fdopen(os.dup(number), "w", encoding="utf-8") as own, redirect_stdout(sys.stderr):
        os.dup2(sys.stderr.fileno(), number)
        try:
            yield own
        finally:
            own.flush()
            os.dup2(own.fileno(), number)


def _answer(line: str, args: argparse.Namespace) -> dict[str, Any]:
    try:
        asked = json.loads(line)
        language, stack = str(asked.get("language", args.language)), str(asked.get("stack", args.stack))
        named = stack if stack in stacks.names() else stacks.of_model(stack).name
        return _preview(str(asked["text"]), language, named, args)
    except KeyError:
        return {"error": "the line has no text"}
    except (ValueError, TypeError, AttributeError) as error:
        return {"error": str(error)}


def _preview(text: str, language: str, stack: str, args: argparse.Namespace) -> dict[str, Any]:
    whole = clean_text(text, name="target_text", max_chars=OrchestratorConfig.max_text_chars)
    found = _frontend(stack, args.skip_thoughts).preview(whole, language, pronunciation=args.pronunciation)
    tokens = [{"text": each, "reason": "control token"} for each in control_tokens(text)]
    return found | ({"left_out": tokens + found.get("left_out", [])} if tokens else {})
