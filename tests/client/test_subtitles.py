"""Subtitles as one track."""

import numpy as np
import pytest
from cosyvoice_triton.cli.say import Cue, read_cues, track
from cosyvoice_triton.constants import SAMPLE_RATE

SRT = "\ufeff1\r\n00:00:01,000 --> 00:00:02,500\r\n<i>Hello</i>\r\nyou.\r\n\r\n2\r\n00:01:03,000 --> 00:01:04,000\r\n"
VTT = "WEBVTT\n\n00:01.000 --> 00:02.500 align:start\n<v Ann>Hello\nyou.\n\n01:02:03.000 --> 01:02:04.000\nA &amp; B"


def test_cues_of_both_formats_are_read() -> None:
    assert read_cues(SRT) == [Cue(1.0, 2.5, "Hello you.")]
    assert read_cues(VTT) == [Cue(1.0, 2.5, "Hello you."), Cue(3723.0, 3724.0, "A & B")]
    with pytest.raises(ValueError, match="no cues"):
        read_cues("hello")
    with pytest.raises(ValueError, match="before it begins"):
        read_cues("00:02.000 --> 00:01.000\nHello")


def test_each_cue_is_in_its_time_unless_the_one_before_leaves_no_room() -> None:
    warnings, asked = list[str](), []

    def speak(text: str, seconds: float) -> np.ndarray:
        asked.append(seconds)
        return np.ones(round(float(text) * SAMPLE_RATE), np.float32)

    cues = [Cue(5.0, 6.0, "0.5"), Cue(1.0, 2.5, "2"), Cue(2.5, 2.6, "1")]
    wave = np.concatenate(list(track(cues, speak, warnings.append)))
    edges = np.flatnonzero(np.diff(wave)) / SAMPLE_RATE
    np.testing.assert_allclose([*edges, wave.size / SAMPLE_RATE], [1.0, 4.0, 5.0, 5.5], atol=1e-3)
    assert asked == [1.5, 0.5, 1.0] and warnings == ["0.50 s late: '1'"]
