"""Dictionaries of words and readings."""

from pathlib import Path

import pytest
from cosyvoice_triton.text.frontend import TextFrontend
from cosyvoice_triton.text.pronunciation import MAX_WORDS, Pronouncer, combined, pronunciations, read_pronunciations

WORDS = {"ß": "s", "nginx": "engine x", "US": "the States", "重庆": "崇庆", "C++": "C plus plus"}
WORDS |= {"New": "Novel", "New York": "Nu York"}


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("Nginx, nginx and NGINX2", "engine x, engine x and NGINX2"),
        ("The US and us", "The the States and us"),
        ("他在重庆市", "他在崇庆市"),
        ("C++ in New York", "C plus plus in Nu York"),
        ("nginxes", "nginxes"),
        ("New Yorkers in New York New York", "Novel Yorkers in Nu York Nu York"),
        ("ßa NGINX", "ßa engine x"),
        ("İ NGINX İ, NGİNX", "İ engine x İ, NGİNX"),
    ],
)
def test_whole_words_are_replaced_and_capitals_of_the_dictionary_are_kept(text: str, spoken: str) -> None:
    assert Pronouncer(WORDS)(text) == spoken


def test_a_reading_is_not_read_again_and_reaches_the_segments() -> None:
    assert Pronouncer({"a": "b", "b": "a"})("a b") == "b a"
    assert list(TextFrontend().segments("We run nginx 2.", pronunciation=WORDS)) == ["We run engine x two."]
    assert list(TextFrontend().segments("我在重庆。", pronunciation={"重庆": "[chóng][qìng]"})) == [
        "我在[chóng][qìng]。"
    ]
    phonemes = {"nginx": "[EH1][N][JH][IH0][N]"}
    assert list(TextFrontend("cosyvoice3").segments("Use Nginx 2.", pronunciation=phonemes)) == [
        "Use [EH1][N][JH][IH0][N] two."
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "must be an object"),
        ("# words\na = b\n\nc d", "line 4: 'c d' is not `word = reading`"),
        ("a =", "line 1: 'a =' is not"),
        ({"a": 1}, "of 'a' must be text"),
        ({"a": " "}, "of 'a' must be text"),
        ({"a": "b" * 201}, "1 characters for the word and 201 for the reading, more than 64 or 200"),
        ({"a" * 65: "b"}, "65 characters for the word"),
        ({str(index): "b" for index in range(MAX_WORDS + 1)}, "more than the limit of 1000"),
    ],
)
def test_what_is_wrong_with_a_dictionary_is_named(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pronunciations(given)


def test_a_dictionary_may_be_json_or_lines() -> None:
    same = {"nginx": "engine x", "C#": "C sharp"}
    for given in (same, '{"nginx": "engine x", "C#": "C sharp"}', "# mine\nnginx = engine x\n\nC#\tC sharp\n"):
        assert pronunciations(given) == same
    assert pronunciations("") == pronunciations(" \n") == {}


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    for content, message in (
        (b"a = b\nc", r"mine\.txt, line 2: 'c' is not"),
        (b"\xff", r"mine\.txt is not UTF-8"),
        (b"#" * 3_000_000, r"mine\.txt has 3000000 bytes, more than"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_pronunciations(file)
    file.write_bytes("\ufeffa = b".encode())  # of an editor that writes a byte order mark
    assert read_pronunciations(file) == {"a": "b"}


def test_the_first_dictionary_has_precedence_also_for_other_forms_of_its_words() -> None:
    words = combined({"nginx": "first"}, {"NGINX": "second", "b": "second"}, {"b": "third", "c": "third"})
    assert words == {"nginx": "first", "b": "second", "c": "third"}
    assert combined({"US": "first"}, {"us": "second"}) == {"US": "first", "us": "second"}
