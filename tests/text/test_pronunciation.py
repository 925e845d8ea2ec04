"""A request's dictionary of words and readings."""

import pytest
from cosyvoice_triton.text import TextFrontend
from cosyvoice_triton.text.pronunciation import MAX_WORDS, pronounced, pronunciations

WORDS = {"nginx": "engine x", "US": "the States", "重庆": "崇庆", "C++": "C plus plus", "New York": "Nu York"}


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("Nginx, nginx and NGINX2", "engine x, engine x and NGINX2"),
        ("The US and us", "The the States and us"),
        ("他在重庆市", "他在崇庆市"),
        ("C++ in New York", "C plus plus in Nu York"),
        ("nginxes", "nginxes"),
    ],
)
def test_whole_words_are_replaced_and_capitals_of_the_dictionary_are_kept(text: str, spoken: str) -> None:
    assert pronounced(text, WORDS) == spoken


def test_a_reading_is_not_read_again_and_reaches_the_segments() -> None:
    assert pronounced("a b", {"a": "b", "b": "a"}) == "b a"
    assert list(TextFrontend().segments("We run nginx 2.", pronunciation=WORDS)) == ["We run engine x two."]
    assert list(TextFrontend().segments("我在重庆。", pronunciation={"重庆": "[chóng][qìng]"})) == [
        "我在[chóng][qìng]。"
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "must be an object"),
        ({"a": 1}, "of 'a' must be text"),
        ({"a": " "}, "of 'a' must be text"),
        ({"a": "b" * 201}, "longer than 200"),
        ({str(index): "b" for index in range(MAX_WORDS + 1)}, "more than the limit of 1000"),
    ],
)
def test_what_is_wrong_with_a_dictionary_is_named(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pronunciations(given)
    assert pronunciations("") == {} and pronunciations('{"a": "b"}') == {"a": "b"}
