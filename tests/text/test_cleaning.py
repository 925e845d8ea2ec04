import pytest

from common.text import clean_line, clean_text, strip_control_tokens


def clean(text: str) -> str:
    return clean_text(text, name="target_text", max_chars=100)


def test_whitespace_of_any_kind_becomes_single_spaces():
    assert clean("  Hello,\tbig\u3000\u00a0 world\r\n") == "Hello, big world"


def test_lines_with_words_are_kept_apart_unless_one_line_is_asked_for():
    text = " one \r\n\n two\u2028<|s_1|>\nthree"
    assert clean(text) == "one\ntwo\nthree"
    assert clean_line(text, name="reference_text", max_chars=100) == "one two three"


def test_text_without_control_tokens_is_left_alone():
    text = "收到好友 [laughter] from <strong>far</strong>: a < b | c > d <||"
    assert clean(text) == text


@pytest.mark.parametrize("token", ["<|s_1|>", "<|eos1|>", "<|endofprompt|>", "<|task_id|>", "<|im_start|>", "<||>"])
def test_control_tokens_are_taken_out(token):
    assert clean(f"one{token} two") == "one two"


@pytest.mark.parametrize("text", ["<|s_<|x|>1|>", "<|<|<|s_1|>s_1|>s_1|>", "<|\x00eos1|>", "<|eos\n1|>"])
def test_taking_out_a_token_never_leaves_another(text):
    with pytest.raises(ValueError, match="nothing to speak"):
        clean(text)


def test_prose_between_far_apart_marks_is_kept():
    text = "<| " + "words " * 12 + "|>"
    assert strip_control_tokens(text) == text


@pytest.mark.parametrize(
    "text", ["", " \n\t", "<|s_1|>", "<|eos1|> <|s_2|>", "\x00\x1f", "\u200b\ufeff \u2060", "?! ...", "。"]
)
def test_text_with_nothing_to_speak_is_refused_by_name_and_value(text):
    with pytest.raises(ValueError) as caught:
        clean(text)
    assert str(caught.value) == f"target_text has nothing to speak: {text!r}"


def test_too_long_text_is_refused_with_both_lengths():
    with pytest.raises(ValueError, match="target_text has 101 characters, more than the limit of 100"):
        clean("a" * 101)
