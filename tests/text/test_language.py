"""The language of texts: by script, by guess, by name."""

import pytest
from cosyvoice_triton.text.cleaning import plain_signs
from cosyvoice_triton.text.frontend import TextFrontend
from cosyvoice_triton.text.language import OF_COSYVOICE2, language_of, language_of_sentence, named


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("My friend 小明 is 20 years old.", "en"),
        ("我们用Python写code review", "zh"),
        ("￥99", "zh"),
        ("お元気ですか", "ja"),
        ("3個の", "ja"),
        ("你好 ok", "zh"),
        ("鲜の每日，新鲜到家门口来了", "zh"),
        ("사과 3개", "ko"),
        ("Где вокзал?", "ru"),
        ("Der Hund schläft unter dem Tisch.", "de"),
        ("Où est la gare, s'il vous plaît ?", "fr"),
        ("¿Dónde está la biblioteca?", "es"),
        ("La città è più bella di sera.", "it"),
        ("สวัสดี", None),
        ("12345", "en"),
        ("Wait 5s, 10 ms", "en"),  # "Wait s ms" would be French
    ],
)
def test_the_words_of_a_text_show_its_language(text: str, language: str | None) -> None:
    assert language_of(text) == language


def test_a_language_that_the_stack_does_not_speak_must_be_certain() -> None:
    assert language_of("Der Zug nach Berlin kommt um 15 Uhr.", None, OF_COSYVOICE2) == "de"
    for text in ("Los Angeles, 72°F", "Die hard 2 tonight"):
        assert language_of(text) != "en" and language_of(text, None, OF_COSYVOICE2) == "en"


def test_a_text_of_few_words_has_the_language_of_the_voice() -> None:
    assert language_of("OK 3", "de") == "de"
    assert language_of("This is a whole sentence.", "de") == "en"


def test_a_sentence_in_another_script_has_its_own_language() -> None:
    assert language_of_sentence("I have three apples.", "zh") == "en"
    assert language_of_sentence("OK.", "zh") == "zh"
    assert language_of_sentence("你好。", "en") == "zh"
    assert language_of_sentence("東京都。", "ja") == "ja"
    assert language_of_sentence("25.", "zh") == "zh"


def test_a_name_of_a_language_is_understood_and_an_unknown_one_names_the_others() -> None:
    assert [named(name) for name in ("zh-CN", "German", "EN_us", "", "auto")] == ["zh", "de", "en", None, None]
    with pytest.raises(ValueError, match="'xx' is not one of auto, zh, en, ja, ko, de"):
        named("xx")
    with pytest.raises(ValueError, match="'de' is not one of auto, zh, en, ja, ko$"):
        named("de", OF_COSYVOICE2)


def test_the_language_of_a_request_decides_how_numbers_are_read() -> None:
    for how in ({"language": "zh"}, {"voice_text": "你好，世界。"}):
        assert list(TextFrontend().segments("25", **how)) == ["二十五。"]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("\u200ehello\u00ad world\u200f\ufeff", "hello world"),
        ("10\u202f000\u00a0€, \u22125, 555\u20110199", "10 000 €, -5, 555-0199"),
        ("Ｈｅｌｌｏ ３．５％ 12：30", "Hello 3.5% 12:30"),
        ("𝐁𝐨𝐥𝐝 ﬁne CO₂ 10⁵ ½ 2½", "Bold fine CO2 10^5 1/2 2 1/2"),
        ("👨\u200d👩\u200d👧", "👨\u200d👩\u200d👧"),
    ],
)
def test_signs_are_what_they_stand_for(text: str, plain: str) -> None:
    assert plain_signs(text) == plain
