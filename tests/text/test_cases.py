"""Held texts in four languages with their segments, and their lengths in Qwen2's own vocabulary.

python -m tests.text.test_cases                 prints the table of docs/results/quality.md
python -m tests.text.test_cases --write         stores the segments of this checkout, for the tests
"""

import json
import sys
from pathlib import Path
from statistics import median

import pytest
from cosyvoice_triton.constants import TOKEN_RATE
from cosyvoice_triton.llm.interface import LengthRatios, LLMPrompt, Sampling
from cosyvoice_triton.text.cleaning import clean_text
from cosyvoice_triton.text.frontend import TextFrontend
from cosyvoice_triton.text.segments import SEGMENT_SECONDS, expected_seconds

from tests.support.qwen_vocabulary import qwen2_tokenizer

CASES = Path(__file__).resolve().parents[1] / "assets" / "text_cases.json"
# By name: a text, and under `segments` [text, expected seconds] of each segment.
HELD = {case["name"]: case for case in json.loads(CASES.read_text(encoding="utf-8"))}
PHRASES = [
    "高速公路",
    "高度重视食品安全。",
    "有限责任公司",
    "你好。",
    "ありがとうございます。",
    "はい。",
    "감사합니다",
    "Hi.",
]


def segments_of(text: str) -> list[list[str | float]]:
    found = TextFrontend().segments(clean_text(text, name="text", max_chars=4096))
    return [[segment, round(expected_seconds(segment), 2)] for segment in found]


@pytest.mark.parametrize("name", HELD)
def test_a_held_text_has_its_segments(name: str) -> None:
    case = HELD[name]
    assert segments_of(case["text"]) == case["segments"]
    assert all(seconds <= SEGMENT_SECONDS for _, seconds in case["segments"])


def test_chinese_segments_have_the_lengths_of_cosyvoice2() -> None:
    """Its limit is 80 characters; half of ours are longer than 50."""
    lengths = [len(text) for case in HELD.values() if case["name"].startswith("zh") for text, _ in case["segments"]]
    assert max(lengths) <= 90 and median(lengths) > 50


def test_the_token_ratios_never_cut_normal_speech() -> None:
    """In the official vocabulary one token is up to ten kana; the ratio alone would cut some phrases."""
    tokenizer = qwen2_tokenizer()
    assert tokenizer.encode("Hello world").ids == [9707, 1879]  # the ids of Qwen2
    spoken = [text for case in HELD.values() for text, _ in case["segments"]]
    cut = []
    for text in [*spoken, *PHRASES]:
        tokens = len(tokenizer.encode(text).ids)
        bound = LengthRatios().bound(Sampling(max_tokens=3000), LLMPrompt(text), tokens)
        expected = TOKEN_RATE * expected_seconds(text)
        assert 2 * bound.min_tokens <= expected * 1.2 and bound.max_tokens >= 2 * expected - 1
        if LengthRatios.max * tokens < 1.2 * expected:
            cut.append(text)
    assert cut == ["ありがとうございます。"]


if __name__ == "__main__":
    held = [case | {"segments": segments_of(case["text"])} for case in HELD.values()]
    if "--write" in sys.argv:
        CASES.write_text(json.dumps(held, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    for each in held:
        lengths = ", ".join(f"{len(text)} ({seconds:.1f} s)" for text, seconds in each["segments"])
        print(f"| {each['name']} | {len(each['text'])} | {lengths} |")
