"""The estimate of durations against recordings and published rates."""

import time

import pytest
import soundfile
from cosyvoice_triton import samples
from cosyvoice_triton.text.segments import expected_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("你好。", 0.8),
        ("今日は。", 1.05),
        ("日本", 0.4),
        ("안녕하세요.", 1.15),
        ("Hello, world.", 1.3),
        ("USB", 0.9),
        ("https", 1.5),
        ("it's we'll", 0.59),
        ("12", 1.0),
        ("a/b", 0.54),
        ("[HH][AH0][L][OW1]", 0.4),
        ("[h][ǎo] [breath]", 0.72),
        ("สวัสดี", 0.6),
        ("wait...!?", 0.88),
        ('"(“”)"', 0.3),
        ("", 0.0),
    ],
)
def test_each_script_has_its_rate(text: str, seconds: float) -> None:
    assert expected_seconds(text) == pytest.approx(seconds)


def test_han_characters_of_japanese_take_longer() -> None:
    assert expected_seconds("日本", japanese=True) == pytest.approx(0.52)
    assert expected_seconds("日本は") == pytest.approx(0.52 + 0.13)


@pytest.mark.parametrize(
    ("recording", "text"),
    [
        (
            "reference_en.wav",
            "Your call is now first in line and will be answered by the next available representative.",
        ),
        ("reference_zh.wav", "甚至出现交易几乎停滞的情况。"),  # a slow reader
    ],
)
def test_recordings_last_as_expected(recording: str, text: str) -> None:
    seconds = soundfile.info(samples.FOLDER / recording).duration
    assert 0.7 < expected_seconds(text) / seconds < 1.1


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        # LJ Speech: 100 characters and 17 words in 6.57 s, the mean of its clips.
        ("It was a bright morning, and the streets of the town were full of people who had come to the market.", 6.6),
        # Rules of thumb for newsreaders: 300 characters a minute, in Chinese and in Japanese.
        ("今天上午，全国各地的学校举行了开学典礼。很多学生回到了久别的校园，见到了老师和同学。", 42 / 5),
        ("今日の午前、全国各地の学校で入学式が行われました。多くの生徒が新しい制服で校門をくぐりました。", 47 / 5),
    ],
)
def test_usual_speaking_rates_are_met(text: str, seconds: float) -> None:
    assert expected_seconds(text) == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize("pattern", ["x", "xa", "X", "X ", "x'", "。", "\u3000", "字", "😀"])
def test_a_long_text_takes_linear_time(pattern: str) -> None:
    begun = time.process_time()
    expected_seconds(pattern * 65_000 + "a")
    assert time.process_time() - begun < 2
