"""Sentences of texts that arrive in pieces: where sentencex ends them, in linear time for any text."""

import random
from collections.abc import Callable

import pytest
import sentencex
from cosyvoice_triton.text.segments import ONE_SENTENCE, SentenceSplitter
from hypothesis import given
from hypothesis import strategies as st

WINDOW = 512

PROSE = [
    "Dr. Smith is in. ",
    'He said "I am here. Really." and left at 3.5 p.m. today, e.g. to see Mr. J. R. R. Tolkien. ',
    "你好。再见！",
    "Is it 12:30, or 1,000.5? ",
    "(All of it. Or most.) ",
    "「はい。そうです。」と言った。",
]
HOSTILE = [
    "\u201a\u300c",
    '"\u300c',
    "\u300c\u3002",
    "\u201c",
    "\u2018",
    "(",
    "a",
    "A.",
    "\u300a\u203c\u2018\u200b\u2019\u00bb",
]


def split(*pieces: str) -> list[str]:
    splitter = SentenceSplitter()
    found = [sentence for piece in pieces for sentence in splitter.push(piece)]
    return [*found, splitter.finish()]


def test_prose_is_split_where_sentencex_splits_it() -> None:
    choose = random.Random(0)
    for sentences in (3, 30, 300):
        text = "".join(choose.choices(PROSE, k=sentences))
        assert split(text) == sentencex.segment("en", text)


@given(
    st.lists(st.text(st.sampled_from("aA.!? \n\"'()\u201c\u201d\u300c\u300d\u3002"), max_size=2 * WINDOW), max_size=4)
)
def test_nothing_is_lost(pieces: list[str]) -> None:
    assert "".join(split(*pieces)) == "".join(pieces)


@given(st.text(st.sampled_from("aB1一가ア ,，、;；'’“”()（）%$-."), max_size=WINDOW))
def test_what_is_taken_for_one_sentence_is_one(text: str) -> None:
    assert not ONE_SENTENCE.match(text) or split(text) == [text]


@pytest.mark.parametrize("pattern", HOSTILE)
@pytest.mark.parametrize("size", [1, 40_000], ids=["characters", "whole"])
def test_a_hostile_text_takes_linear_time(pattern: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (pattern * 40_000)[: 40_000 if size > 1 else 700]
    lengths = counted_calls(monkeypatch, sentencex.segment)
    assert "".join(split(*(text[begin : begin + size] for begin in range(0, len(text), size)))) == text
    assert max(lengths) <= WINDOW and len(lengths) <= 2 * len(text) / min(size, WINDOW) + 2


def test_a_text_takes_linear_time_even_if_every_window_begins_with_a_short_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = counted_calls(monkeypatch, lambda _, window: [window[:1], window[1:]])
    assert "".join(split("a" * 40_000)) == "a" * 40_000
    assert len(lengths) <= 2 * 40_000 / WINDOW + 2


def counted_calls(monkeypatch: pytest.MonkeyPatch, segment: Callable[[str, str], list[str]]) -> list[int]:
    """The lengths of the texts that sentencex gets from now on; `segment` answers."""
    lengths: list[int] = []

    def counted(language: str, window: str) -> list[str]:
        lengths.append(len(window))
        return segment(language, window)

    monkeypatch.setattr(sentencex, "segment", counted)
    return lengths
