import random
from collections.abc import Iterator

import pytest

from common.llm.speech_tokens import LLMTokenizer
from common.text import TextFrontend, clean_text
from common.text.normalization import half_width, language_of, normalized
from common.text.segments import MIN_TOKENS, SEGMENT_TOKENS, segments, sentences
from tools.demo_model.llm import build_tokenizer


def words(text: str) -> int:
    """Fake token count: one token per word or Chinese character."""
    return len("".join(f" {char} " if "\u4e00" <= char <= "\u9fff" else char for char in text).split())


@pytest.fixture(scope="module")
def frontend() -> TextFrontend:
    return TextFrontend(words)


# --- normalization ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("It costs $12.50, and 3.5% more.", "It costs twelve point five dollars, and three point five percent more."),
        ("On 2023-11-05 at 5:30 p.m.", "On the fifth of november twenty twenty three at five thirty PM"),
        ("Dr. Smith ran 5 km at 20°C.", "doctor Smith ran five kilometers at twenty degrees Celsius."),
        (
            "I have 1,234,567 items.",
            "I have one million two hundred thirty four thousand five hundred and sixty seven items.",
        ),
        ("We are #1 for 100€.", "We are number one for one hundred euro."),
        ("价格是13.5元，涨了3.5%。", "价格是十三点五元，涨了百分之三点五。"),
        ("价格是￥１３．５，涨了３．５％。", "价格是十三点五元，涨了百分之三点五。"),
        ("会议在2023年11月5日12：30开始。", "会议在二零二三年十一月五日十二点三十分开始。"),
        ("他买了3个apple，25kg。", "他买了三个apple，二十五千克。"),
        ("電話は3個で¥500です。", "電話は三個で五百円です。"),
    ],
)
def test_numbers_dates_units_and_currencies_become_words(text: str, spoken: str) -> None:
    language = language_of(text)
    assert language is not None
    assert normalized(half_width(text), language) == spoken


@pytest.mark.parametrize(
    "text",
    [
        '"[laughter]" and <strong>so</strong> on \\ "',
        "in the 1990s",
        "version 2.0.1",
        "  blanks at both ends ",
        "",
        "“quoted” – café… 😀",
    ],
)
def test_text_that_needs_no_words_or_would_be_misread_is_unchanged(text: str) -> None:
    assert normalized(text, "en") == text


@pytest.mark.parametrize(
    ("text", "language"),
    [("Hello 3", "en"), ("12345", "en"), ("你好 ok", "zh"), ("3個の", "ja"), ("사과 3", None), ("Привет 3", None)],
)
def test_the_script_decides_the_grammar(text: str, language: str | None) -> None:
    assert language_of(text) == language


@pytest.mark.slow
def test_no_text_makes_normalization_fail_or_return_nothing() -> None:
    """The English grammar raises an assertion for many mixtures."""
    rng = random.Random(0)
    alphabet = (
        "abc XYZ 0123456789.,!?;:-/$€£¥%&@#\"'\\{}[]()<>|~`*_+=^ é中文元年月日。，！？；：“”（）あいう한글 😀\u200b"
    )
    for _ in range(1500):
        text = "".join(rng.choices(alphabet, k=rng.randint(1, 24)))
        for language in ("zh", "en", "ja"):
            spoken = normalized(text, language)  # type: ignore[arg-type]
            assert bool(spoken.strip()) == bool(text.strip())
            assert spoken.count("\\") == text.count("\\")


# --- sentences ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Dr. Smith paid 3.50 at 5 p.m. on Jan. 5. He left.", ["Dr. Smith paid 3.50 at 5 p.m. on Jan. 5.", "He left."]),
        (
            "“真的吗？”他走了！价格是3.5元。Hello world. 你好。",
            ["“真的吗？”", "他走了！", "价格是3.5元。", "Hello world.", "你好。"],
        ),
        ("そうですか？はい！", ["そうですか？", "はい！"]),
        ("Wait... what?! See e.g. this.", ["Wait... what?!", "See e.g. this."]),
    ],
)
def test_sentences_end_at_punctuation_but_not_at_abbreviations_or_decimals(text: str, expected: list[str]) -> None:
    assert [sentence.strip() for sentence in sentences(text)] == expected


def test_the_end_of_a_line_ends_a_sentence_and_gets_punctuation() -> None:
    assert "".join(sentences("A heading\nText, more\n---\n标题\n正文。")) == "A heading. Text, more. 标题。正文。"


# --- segments ----------------------------------------------------------------------------------------------------


def sentence_of(length: int) -> str:
    return " ".join(["word"] * length) + ". "


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([5], [5]),
        ([40, 40], [80]),
        ([40, 41], [40, 41]),
        ([60, 30, 30], [60, 60]),
        ([80, 10, 9], [99]),
        ([80, 20], [80, 20]),
        ([80, 80, 80, 5], [80, 80, 85]),
    ],
)
def test_sentences_fill_segments_and_a_short_rest_joins_the_last(lengths: list[int], expected: list[int]) -> None:
    assert [words(segment) for segment in segments(map(sentence_of, lengths), words)] == expected


def test_a_sentence_that_is_too_long_is_split_at_clauses_then_words_then_anywhere() -> None:
    clause = " ".join(["word"] * 50) + ", "
    assert [words(part) for part in segments([clause * 3], words)] == [50, 50, 50]
    assert [words(part) for part in segments([" ".join(["word"] * 200)], words)] == [80, 80, 40]
    assert [words(part) for part in segments(["字" * 200], words)] == [80, 80, 40]
    assert [len(part) for part in segments(["1,000,000" * 20], len)] == [80, 80, 20]
    assert [words(part) for part in segments(["一" * 60 + "，" + "二" * 60 + "。"], words)] == [61, 61]


def test_segments_are_generated_lazily() -> None:
    asked = []

    def spoken() -> Iterator[str]:
        for index in range(100):
            asked.append(index)
            yield sentence_of(40)

    made = segments(spoken(), words)
    next(made)
    assert len(asked) == 3


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        "Sentence number 1 is here. " * 40 + "OK.",
        "这是第1个很长的句子，没有句号，" * 40,
        "word " * 400,
        "字" * 900,
        "x" * 500,
        "Title\n1. first\n2. second\n" * 30,
        "사과 3개. " * 60,
        "😀" * 90,
    ],
)
def test_no_word_is_lost_and_every_segment_fits_the_limit(text: str, normalize: bool, frontend: TextFrontend) -> None:
    tokenizer = LLMTokenizer(build_tokenizer(), 0, (), 0, 0)
    made = list(TextFrontend(tokenizer.text_length).segments(clean_text(text, name="t", max_chars=4096), normalize))
    assert all(tokenizer.text_length(segment) <= SEGMENT_TOKENS + MIN_TOKENS for segment in made)
    if not normalize:
        letters = [char for char in "".join(made) if char.isalnum()]
        assert letters == [char for char in text if char.isalnum()]


def test_numbers_are_unchanged_without_normalization(frontend: TextFrontend) -> None:
    assert list(frontend.segments("It costs $5.", normalize=False)) == ["It costs $5."]
    assert list(frontend.segments("It costs $5.")) == ["It costs five dollars."]


def test_a_transcript_is_normalized_as_a_whole_unless_disabled(frontend: TextFrontend) -> None:
    text = "I have 3. " * 60 + "好"
    assert frontend.transcript(text) == "I have three. " * 60 + "好。"
    assert frontend.transcript(text, normalize=False) == text


def test_a_number_without_letters_is_read_in_the_language_of_the_text(frontend: TextFrontend) -> None:
    assert list(frontend.segments("价格是多少？\n25\n好。")) == ["价格是多少？二十五. 好。"]
    assert list(frontend.segments("12")) == ["twelve."]
