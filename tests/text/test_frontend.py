from collections.abc import Iterator

import pytest
from cosyvoice_triton.prepare.huggingface_llm import PHONEMES, TEXT_SPECIALS
from cosyvoice_triton.text.cleaning import clean_text
from cosyvoice_triton.text.frontend import TextFrontend, normalized
from cosyvoice_triton.text.segments import SEGMENT_SECONDS, expected_seconds, segments, sentences


@pytest.fixture(scope="module")
def frontend() -> TextFrontend:
    return TextFrontend()


# --- normalization ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ['"[laughter]" and <strong>so</strong> on \\ "', "  blanks at both ends ", "", "“quoted” – café… 😀"]
)
def test_text_that_needs_no_words_or_would_be_misread_is_unchanged(text: str) -> None:
    assert normalized(text, "en") == text


def test_what_a_request_wants_unchanged_is_not_spelled_out() -> None:
    text = "See https://a.org/b or bob@a.org, 555-1234."
    assert normalized(text, "en", ("url_normalization",)).startswith(
        "See https://a.org/b or bob at a dot org, five five five"
    )
    assert normalized(text, "en", ("email_normalization",)).startswith(
        "See a dot org slash b or bob@a.org, five five five"
    )
    assert normalized(text, "en", ("phone_normalization",)).endswith(", 555-1234.")


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
    text = "A heading\nText, more\n---\n标题\n正文。"
    assert "".join(sentences(text)) == "A heading. Text, more. 标题。正文。"
    assert "".join(sentences(text, close=False)) == "A headingText, more标题正文。"


# --- segments ----------------------------------------------------------------------------------------------------


def sentence_of(seconds: int) -> str:
    return " ".join(["word"] * seconds) + ". "


def words(text: str) -> float:
    """Fake estimate: a second for each word or Chinese character."""
    return len("".join(f" {char} " if "\u4e00" <= char <= "\u9fff" else char for char in text).split())


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([5], [5]),
        ([9, 9], [18]),
        ([9, 10], [9, 10]),
        ([12, 10, 8], [12, 18]),
        ([17, 1], [18]),
        ([10, 8, 2], [10, 10]),  # a short rest takes a sentence from the segment before it
        ([18, 2], [18, 2]),  # which must have several
        ([2, 16, 2], [2, 18]),
        ([1, 17, 2], [18, 2]),  # and not so long a one
        ([10, 8, 3], [18, 3]),
        ([18, 18, 18, 5], [18, 18, 18, 5]),
    ],
)
def test_sentences_fill_segments_and_a_short_rest_does_not_stay_alone(lengths: list[int], expected: list[int]) -> None:
    assert [words(segment) for segment in segments(map(sentence_of, lengths), words)] == expected


def test_a_sentence_that_is_too_long_is_split_evenly_at_clauses_then_words_then_anywhere() -> None:
    clause = " ".join(["word"] * 11) + ", "
    assert [words(part) for part in segments([clause * 3], words)] == [11, 11, 11]
    assert [words(part) for part in segments([" ".join(["word"] * 40)], words)] == [13, 14, 13]
    assert [words(part) for part in segments(["字" * 40], words)] == [16, 16, 8]  # eight characters at a time
    assert [len(part) for part in segments(["1,000,000" * 4], len)] == [18, 18]
    assert [words(part) for part in segments(["一" * 12 + "，" + "二" * 12 + "。"], words)] == [13, 13]


def test_a_smaller_limit_makes_smaller_segments(frontend: TextFrontend) -> None:
    text = "这是一个不太长的句子。" * 12
    lengths = {
        seconds: max(map(expected_seconds, frontend.segments(text, request_seconds=seconds))) for seconds in (1, 15, 60)
    }
    assert lengths[1] <= 6 < lengths[15] <= 0.6 * 15 < lengths[60] <= SEGMENT_SECONDS


def test_segments_are_generated_lazily() -> None:
    asked = []

    def spoken() -> Iterator[str]:
        for index in range(100):
            asked.append(index)
            yield sentence_of(9)

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
        "今日" * 200 + "は" * 100,
        "x" * 500,
        "Title\n1. first\n2. second\n" * 30,
        "사과 3개. " * 60,
        "สวัสดี" * 60,
        "NASA/" * 60,
        "https://example.com/?id=123&q=%20" * 12,
        "word 😀 " * 90,
    ],
)
def test_no_word_is_lost_and_every_segment_fits_the_limit(text: str, normalize: bool, frontend: TextFrontend) -> None:
    made = list(frontend.segments(clean_text(text, name="t", max_chars=4096), normalize))
    japanese = "は" in text
    assert all(expected_seconds(segment, japanese) <= SEGMENT_SECONDS + 1e-9 for segment in made)
    if not normalize:
        letters = [char for char in "".join(made) if char.isalnum()]
        assert letters == [char for char in text if char.isalnum()]


@pytest.mark.parametrize("pattern", ["\u201c", "(", '"', "x", "字", "a, "])
def test_a_hostile_text_takes_linear_time(pattern: str) -> None:
    """Each character is estimated a few times, however long the text. For the sentences see test_sentences.py."""
    size = 65_000
    text, estimated = (pattern * size)[:size] + "a", 0

    def seconds(part: str) -> float:
        nonlocal estimated
        estimated += len(part)
        return expected_seconds(part, japanese=False)

    for segment in segments(sentences(text), seconds):
        assert len(segment) <= SEGMENT_SECONDS / 0.025
    assert estimated <= 6 * size


def test_nothing_is_changed_without_normalization(frontend: TextFrontend) -> None:
    for text in ("It costs $5.", "你 好（吗），", "*a* <b> 😀."):
        assert list(frontend.segments(text, normalize=False)) == [text]
    assert list(frontend.segments("It costs $5.")) == ["It costs five dollars."]


def test_a_transcript_is_normalized_as_a_whole_unless_disabled_and_gets_no_full_stop(frontend: TextFrontend) -> None:
    text = "I have 3. " * 60 + "好"
    assert frontend.transcript(text) == "I have three. " * 60 + "好"
    assert frontend.transcript(text, normalize=False) == text
    assert frontend.transcript("No stop") == "No stop"


def test_a_number_without_letters_is_read_in_the_language_of_the_text(frontend: TextFrontend) -> None:
    assert list(frontend.segments("价格是多少？\n25\n好。")) == ["价格是多少？二十五。好。"]
    assert list(frontend.segments("12")) == ["twelve."]


# --- markup ------------------------------------------------------------------------------------------------------


def test_a_text_of_markup_alone_has_nothing_to_speak(frontend: TextFrontend) -> None:
    for text in ("<b></b>", "<!-- x -->", "[](https://a.org)"):
        with pytest.raises(ValueError, match="nothing to speak"):
            next(frontend.segments(text))


def test_the_bullet_of_a_line_leaves_no_blank(frontend: TextFrontend) -> None:
    assert list(frontend.segments("Shopping:\n▪ Milk\n▪\ufe0f Eggs\n• Tea")) == ["Shopping: Milk. Eggs. Tea."]


# --- Chinese -----------------------------------------------------------------------------------------------------


def test_a_chinese_transcript_is_cleaned_and_gets_no_full_stop(frontend: TextFrontend) -> None:
    """As segments are, see cases/signs.jsonl."""
    for text, clean in (("你 好 ， 世 界", "你好，世界"), ("面积是100m²。", "面积是一百平方米。")):
        assert frontend.transcript(text) == clean


@pytest.mark.parametrize(
    "sentence",
    ["报道{}予好评，有3个。", "He said {} to them.", "他说{}。It is {} here.", "{}因为[breath]他[laughter]笑。"],
)
def test_tags_of_sounds_and_phonemes_reach_the_llm_as_they_are(frontend, sentence):
    """The tokens of CosyVoice2's and CosyVoice3's vocabularies for what letters do not say."""
    sounds = [token for token in TEXT_SPECIALS if token[0] == "["]
    for tag in (*sounds, *PHONEMES, "<strong>", "<laughter>"):
        text = clean_text(sentence.format(tag + tag, tag), name="text", max_chars=1000)
        spoken = "".join(frontend.segments(text))
        assert spoken.count(tag) == text.count(tag), tag
