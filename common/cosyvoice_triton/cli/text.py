"""Print what will be spoken of a text: its segments in words, with the seconds that each is expected to take.

    cosyvoice-triton text 'It costs $1,299.'
    cosyvoice-triton text --stack cosyvoice3 --language de <letter.txt
    cosyvoice-triton text --jsonl <texts.jsonl >segments.jsonl

With --jsonl each line of the input is an object with "text", and optionally "language" and "stack"; each line of the
output has "segments", "seconds" and "language", or "error".
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from cosyvoice_triton import stacks
from cosyvoice_triton.cli.arguments import words
from cosyvoice_triton.config import OrchestratorConfig
from cosyvoice_triton.text import TextFrontend, clean_text
from cosyvoice_triton.text.duration import expected_seconds
from cosyvoice_triton.text.kana import MISSING, has_kanji, kana_available
from cosyvoice_triton.text.language import language_of, named
from cosyvoice_triton.text.markup import Pause

_frontend = cache(TextFrontend)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", help="without it: standard input")
    parser.add_argument("--language", default="", help="zh, en, ja, ko, de, fr, es, it or ru; without it: guessed")
    parser.add_argument("--stack", default="", help="dit, unet or cosyvoice3; they read some languages differently")
    parser.add_argument("--pronunciation", type=words, default={}, metavar="FILE", help="words = readings, a line each")
    parser.add_argument("--jsonl", action="store_true", help="read and write JSON lines")
    args = parser.parse_args(argv)
    if args.jsonl:
        for line in sys.stdin:
            if line.strip():
                print(
                    json.dumps(_answer(line, args.language, args.stack, args.pronunciation), ensure_ascii=False),
                    flush=True,
                )
        return 0
    text = sys.stdin.read() if args.text is None else args.text
    try:
        for segment, seconds in _segments(text, args.language, args.stack, args.pronunciation):
            print(f"{seconds:5.1f} s  {segment if isinstance(segment, str) else '(pause)'}")
            if args.stack == stacks.COSYVOICE3.name and isinstance(segment, str) and _unread(segment):
                print(f"warning: {MISSING}", file=sys.stderr)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _answer(line: str, language: str, stack: str, given: dict[str, str]) -> dict[str, Any]:
    try:
        asked = json.loads(line)
        text, language = str(asked["text"]), str(asked.get("language", language))
        found = list(_segments(text, language, str(asked.get("stack", stack)), given))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return {"error": str(error)}
    segments = [segment for segment, _ in found if isinstance(segment, str)]
    seconds = [round(length, 2) for segment, length in found if isinstance(segment, str)]
    return {"segments": segments, "seconds": seconds, "language": named(language) or language_of(text)}


def _segments(text: str, language: str, stack: str, given: dict[str, str]) -> Iterator[tuple[str | Pause, float]]:
    whole = clean_text(text, name="text", max_chars=OrchestratorConfig.max_text_chars)
    for part in _frontend(stack).segments(whole, language=language, pronunciation=given):
        yield part, part.seconds if isinstance(part, Pause) else expected_seconds(part)


def _unread(segment: str) -> bool:
    return language_of(segment) == "ja" and has_kanji(segment) and not kana_available()


if __name__ == "__main__":
    sys.exit(main())
