import pytest
from cosyvoice_triton.text.cleaning import clean_line, clean_text, split_instruction, strip_control_tokens


def clean(text: str) -> str:
    return clean_text(text, name="target_text", max_chars=100)


def test_whitespace_of_any_kind_becomes_single_spaces():
    assert clean("  Hello,\tbig\u3000\u00a0 world\r\n") == "Hello, big world"


def test_lines_are_kept_by_clean_text_and_joined_by_clean_line():
    text = " one \r\n\n two\u2028<|s_1|>\nthree"
    assert clean(text) == "one\ntwo\nthree"
    assert clean_line(text, name="reference_text", max_chars=100) == "one two three"


def test_hidden_signs_and_heaps_of_accents_are_left_out():
    hidden = "".join(chr(0xE0000 + ord(char)) for char in "spam")
    assert clean(f"Hi{hidden} you,\U000e0100 Z" + "\u0301" * 30 + "o") == "Hi you, Zo"
    assert clean("e\u0301 ก็่ नि 🏴\U000e0067\U000e007f a") == "e\u0301 ก็่ नि 🏴 a"


@pytest.mark.parametrize("token", ["<|s_1|>", "<|eos1|>", "<|fill|>", "<|task_id|>", "<|im_start|>", "<||>"])
def test_control_tokens_are_removed(token):
    assert clean(f"one{token} two") == "one two"


@pytest.mark.parametrize("text", ["<|s_<|x|>1|>", "<|<|<|s_1|>s_1|>s_1|>", "<|\x00eos1|>", "<|eos\n1|>"])
def test_removing_a_token_never_leaves_another(text):
    with pytest.raises(ValueError, match="nothing to speak"):
        clean(text)


@pytest.mark.parametrize(
    "text", ["收到好友 [laughter] from <strong>far</strong>: a < b | c > d <||", "<| " + "words " * 12 + "|>"]
)
def test_text_without_control_tokens_is_unchanged_also_between_distant_marks(text):
    assert clean(text) == strip_control_tokens(text) == text


@pytest.mark.parametrize(
    "text", ["", " \n\t", "<|s_1|>", "<|eos1|> <|s_2|>", "\x00\x1f", "\u200b\ufeff \u2060", "?! ...", "。", "😀 👍🏽!"]
)
def test_text_without_words_is_rejected_with_its_name_and_value(text):
    with pytest.raises(ValueError) as caught:
        clean(text)
    assert str(caught.value) == f"target_text has nothing to speak: {text!r}"


def test_text_that_is_too_long_is_rejected_with_both_lengths():
    with pytest.raises(ValueError, match="target_text has 101 characters, more than the limit of 100"):
        clean("a" * 101)


def test_an_optional_line_may_be_blank_but_not_of_control_tokens_alone():
    for text, line in (("", ""), (" \n\t", ""), (" a\nb ", "a b")):
        assert clean_line(text, name="reference_text", max_chars=3) == line
    with pytest.raises(ValueError, match="reference_text has nothing to speak"):
        clean_line("<|s_1|>", name="reference_text", max_chars=100)


@pytest.mark.parametrize(
    ("text", "instruction"),
    [
        ("You are a helpful assistant.<|endofprompt|>Hi.", ""),
        (" You are a helpful assistant. <|endofprompt|> Hi.", ""),
        ("You are a helpful assistant. Speak\nsadly.<|endofprompt|>Hi.", "Speak sadly."),
        ("用四川话说这句话<|endofprompt|>Hi.", "用四川话说这句话"),
        ("You are a helpful assistant.<|endofprompt|>Loudly.<|endofprompt|>Hi.", "Loudly."),
    ],
)
def test_what_is_before_the_end_of_a_prompt_is_an_instruction_and_not_spoken(text, instruction):
    assert clean_text(text, name="text", max_chars=100) == "Hi."
    found, spoken = split_instruction(text)
    assert found == instruction and spoken.strip() == "Hi."


def test_a_text_of_an_instruction_alone_has_nothing_to_speak_and_words_without_their_token_are_text():
    with pytest.raises(ValueError, match="text has nothing to speak"):
        clean("Speak sadly.<|endofprompt|>")
    assert clean("You are a helpful assistant. Hi.") == "You are a helpful assistant. Hi."
