"""Everyday text in nine languages: cases that a careful reader judged (given*.jsonl), others from life, also each kind
beside what looks like it (pairs, fresh, unseen), and numbers, markup and signs as they must become words (signs).
"""

import json
import re
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cosyvoice_triton.text.cleaning import clean_text
from cosyvoice_triton.text.frontend import TextFrontend
from cosyvoice_triton.text.kana import kana_available

CASES = Path(__file__).parent / "cases"
LANGUAGES = ["zh", "en", "ja", "ko", "de", "fr", "es", "it", "ru"]
frontend = cache(TextFrontend)


def cases() -> list[dict[str, Any]]:
    texts = [path.read_text("utf-8") for path in sorted(CASES.glob("*.jsonl"))]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def stack_of(case: dict[str, Any]) -> str:
    if case["stack"] != "any":
        return str(case["stack"])
    return "cosyvoice2" if case["lang"] in ("zh", "en", "ja", "ko") else "cosyvoice3"


def read(text: str, stack: str, **options: Any) -> list[str]:
    found = frontend(stack).segments(clean_text(text, name="text", max_chars=4096), **options)
    return [part for part in found if isinstance(part, str)]


def passes(case: dict[str, Any], segments: list[str]) -> bool:
    text = " ".join(unicodedata.normalize("NFC", " ".join(segments)).split())
    accepted = any(re.fullmatch(pattern, text, re.IGNORECASE) for pattern in case["accept"])
    rejected = any(re.search(pattern, text, re.IGNORECASE) for pattern in case["reject"])
    return accepted and not rejected and len(segments) >= case.get("min_segments", 1)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("named", [False, True], ids=["guessed", "named"])
def test_everyday_text_is_read_as_a_careful_person_reads_it(language: str, named: bool) -> None:
    of_language = [case for case in cases() if case["lang"] == language]
    if not kana_available():
        of_language = [case for case in of_language if case["kind"] != "kanji"]
    missed = {}
    for case in of_language:
        segments = read(case["text"], stack_of(case), language=language if named and stack_speaks(case) else "")
        if not passes(case, segments):
            missed[case["id"]] = segments
    assert not missed


def stack_speaks(case: dict[str, Any]) -> bool:
    return case["lang"] in frontend(stack_of(case)).languages
