"""Speech of a given length."""

import dataclasses

import numpy as np
import pytest
from cosyvoice_triton.audible import SilenceTrimmer
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.orchestrator.length import FASTEST, SLOWEST, fitting_speed, misfit
from cosyvoice_triton.text.markup import without_duration

from tests.orchestrator.test_request import check
from tests.support.fakes import FakeLM, FakeToken2Wav
from tests.support.pipeline import Pipeline, one_by_one, speech_request


def spoken(before: float, heard: float, after: float, speed: float = 1.0) -> np.ndarray:
    """Silence, noise and silence of so many seconds at speed 1."""
    samples = [round(seconds / speed * SAMPLE_RATE) for seconds in (before, heard, after)]
    noise = 0.3 * np.random.default_rng(1).standard_normal(samples[1]).astype(np.float32)
    return np.concatenate([np.zeros(samples[0], np.float32), noise, np.zeros(samples[2], np.float32)])


@pytest.mark.parametrize("seconds", [2.3, 2.9, 3.6])
@pytest.mark.parametrize("trims", [True, False])
def test_the_speed_makes_segments_as_long_as_wanted_after_their_silence_is_cut(seconds: float, trims: bool) -> None:
    parts, pause = [(0.5, 1.0, 0.02), (0.01, 1.3, 0.6)] if trims else [(0, 1.0, 0), (0, 1.6, 0)], 0.2
    speed = fitting_speed([spoken(*part) for part in parts], round(pause * SAMPLE_RATE), seconds, trims=trims)
    waves = [spoken(*part, speed=speed) for part in parts]
    waves = [SilenceTrimmer().trimmed(wave, final=True) if trims else wave for wave in waves]
    assert sum(wave.size for wave in waves) / SAMPLE_RATE + pause == pytest.approx(seconds, rel=0.015)
    assert not misfit(seconds * 1.02, seconds)


def test_a_length_out_of_reach_gets_the_nearest_speed_and_a_warning() -> None:
    wave = spoken(0, 2.0, 0)
    assert fitting_speed([wave], 0, 1.0, trims=False) == FASTEST
    assert fitting_speed([wave], 0, 9.0, trims=False) == SLOWEST
    token2wav, warnings = FakeToken2Wav(), list[str]()
    pipeline = Pipeline(FakeLM(*one_by_one(40)), token2wav=token2wav)
    request = dataclasses.replace(speech_request(), duration=1.0)
    (streamed,) = pipeline.run(pipeline.synthesize(request, on_warning=warnings.append))
    assert streamed.size == 40 and [speed for _, speed in token2wav.offline_calls] == [1.0, SLOWEST]
    assert "not 1: it is at a speed of 0.7 to 1.4" in warnings[-1]


def test_without_a_duration_nothing_is_rendered_again() -> None:
    pipeline = Pipeline(FakeLM(*one_by_one(40)))
    pipeline.run(pipeline.offline(speech_request()))
    assert [speed for _, speed in pipeline.token2wav.offline_calls] == [1.0]


def test_a_duration_is_a_parameter_or_markup_around_the_whole_text() -> None:
    assert check().duration is None and check(parameters={"duration": "2.5"}).duration == 2.5
    request = check(target_text='<speak> <prosody duration="1500ms">Hello <s>you</s></prosody></speak>')
    assert (request.duration, request.target_text) == (1.5, "<speak>Hello <s>you</s></speak>")
    assert without_duration("<speak>Hello</speak>") == ("<speak>Hello</speak>", None)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"parameters": {"duration": "0.1"}}, "duration 0.1 is not in 0.5..120"),
        ({"parameters": {"duration": 2, "speed": 1.1}}, "duration 2 is for a whole text without a speed"),
        ({"target_text": "<speak><prosody duration='long'>Hello</prosody></speak>"}, "duration 'long' of <prosody>"),
    ],
)
def test_a_duration_that_cannot_be_is_named(inputs, message) -> None:
    with pytest.raises(ValueError, match=message):
        check(**inputs)
