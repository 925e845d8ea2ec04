"""Every letter and digit of a text is spoken, or left out with a reason, or the text is an error."""

import unicodedata
from collections import Counter

import pytest
from cosyvoice_triton.text.cleaning import _ENTITY, _FORMULA, clean_text, plain_signs, plain_text, without_markup
from cosyvoice_triton.text.frontend import TextFrontend, normalized
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.test_hostile import HOSTILE
from tests.text.test_reading import cases

PIECES = (
    """Hello 世界 안녕 ぬ 12 3.5 <p> </p> [x](y) $5 ① x² ~~~ <b> 5/12 -3 1:30 90s &amp; `a` ** No.
May IV % km 😀 :) [^1] <td> | a.b. .5 Jan""".split()
    + [*HOSTILE.values(), " ", "\n"]
)
MIXED = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), min_size=1, max_size=12).map("".join)


def letters(text: str) -> Counter[str]:
    plain = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return Counter(char for char in plain if char.isalnum())


def lost(text: str) -> Counter[str]:
    """Return the letters and digits of `text` that its cleaning neither keeps nor names as left out."""
    left: list[str] = []
    kept = plain_signs(plain_text(text, lambda part, _: left.append(part)), lambda part, _: left.append(part))
    kept = without_markup(kept, lambda part, _: left.append(part))
    return letters(text) - letters(kept) - sum(map(letters, left), Counter())


def test_no_case_and_no_hostile_text_loses_a_letter() -> None:
    texts = [case["text"] for case in cases()] + [(unit * 60)[:300] for unit in HOSTILE.values()]
    texts = [text for text in texts if not _ENTITY.search(text) and not _FORMULA.search(text)]  # written otherwise
    assert {text: missing for text in texts if (missing := lost(text))} == {}


@given(MIXED)
@settings(max_examples=60, deadline=None)
def test_no_mixture_loses_a_letter(text: str) -> None:
    if not (_ENTITY.search(text) or _FORMULA.search(text)):
        assert not lost("".join(char for char in text if char.isprintable() or char == "\n"))


@pytest.mark.parametrize("language", ["zh", "en", "ja", "ko"])
@given(text=MIXED)
@settings(max_examples=30, deadline=None)
def test_the_words_of_a_text_have_a_letter_for_every_number(text: str, language: str) -> None:
    spoken = normalized(text, language)  # type: ignore[arg-type]
    assert bool(letters(spoken)) == bool(letters(text)) or not letters(text)
    for piece in ("Hello", "世界", "안녕", "ぬ"):
        assert spoken.count(piece) >= text.count(piece)


@given(MIXED)
@settings(max_examples=40, deadline=None)
def test_a_text_is_spoken_or_an_error(text: str) -> None:
    left: list[str] = []
    try:
        whole = clean_text(text, name="text", max_chars=4096)
        found = list(TextFrontend().segments(whole, on_left_out=lambda part, _: left.append(part)))
    except ValueError as error:
        assert "nothing to speak" in str(error) or "<" in text or "[" in text
        return
    assert letters("".join(part for part in found if isinstance(part, str)))


@pytest.mark.parametrize(
    "text", [".590s", "Dial +44 2", "well-known-.12", "3.90s", "5-.5", "123~5개", "[a](b$20です。第3章)"]
)
def test_what_mixtures_have_found_stays_mended(text: str) -> None:
    assert not lost(text) and all(letters(normalized(text, language)) for language in ("zh", "en", "ja", "ko"))


def test_what_is_left_out_is_told_with_a_reason() -> None:
    told: dict[str, str] = {}
    text = "<style>p{}</style><p>Hi [docs](https://a.org) :) [^1] [mood:glad]</p>"
    assert list(TextFrontend().segments(text, on_left_out=told.__setitem__)) == ["Hi docs."]
    assert told == {
        "[mood:glad]": "tag that means nothing here",
        "<style>p{}</style>": "contents of <style>",
        "<p>": "HTML tag",
        "</p>": "HTML tag",
        ":)": "smiley",
        "[^1]": "footnote mark",
        "https://a.org": "address of a link",
    }
