from typing import Any

import numpy as np
import pytest

from common.constants import PROMPT_SAMPLE_RATE
from common.llm.base import Sampling
from common.request import RequestInputs, SpeechRequest

WAV = np.sin(np.arange(PROMPT_SAMPLE_RATE, dtype=np.float32))


def check(defaults: Sampling | None = None, **inputs: Any) -> SpeechRequest:
    given = {"target_text": "hello", "reference_wav": WAV, "reference_text": "reference"} | inputs
    return RequestInputs(**given).check(defaults or Sampling(), max_text_chars=100)


def test_a_request_without_parameters_samples_by_the_defaults() -> None:
    defaults = Sampling(temperature=0.5, max_tokens=99)
    assert check(defaults).sampling == defaults


def test_parameters_replace_the_defaults_and_those_of_triton_are_ignored() -> None:
    parameters = {"seed": 7, "temperature": 0, "top_p": "0.5", "top_k": 3, "repetition_penalty": 1.5, "max_tokens": "9"}
    sampling = check(parameters=parameters | {"triton_enable_empty_final_response": True, "speed": 1}).sampling
    assert sampling == Sampling(seed=7, temperature=0.0, top_p=0.5, top_k=3, repetition_penalty=1.5, max_tokens=9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -1),
        ("seed", "abc"),
        ("seed", True),
        ("temperature", float("nan")),
        ("temperature", "inf"),
        ("temperature", -0.5),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("top_k", [5]),
        ("repetition_penalty", 0),
        ("max_tokens", 0),
        ("max_tokens", "7.5"),
        ("speed", 0.1),
        ("speed", 4.5),
        ("speed", "fast"),
    ],
)
def test_a_bad_parameter_is_an_error_naming_it_and_its_value(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name) as error:
        check(parameters={name: value})
    assert str(value) in str(error.value)


def test_the_padding_behind_the_reference_is_cut_off() -> None:
    padded = np.concatenate([WAV, np.full(5000, np.nan, np.float32)])[None]
    np.testing.assert_array_equal(check(reference_wav=padded, reference_wav_len=len(WAV)).reference, WAV)
    np.testing.assert_array_equal(check(reference_wav=WAV, reference_wav_len=None).reference, WAV)


@pytest.mark.parametrize("text", [None, "", "  \n"])
def test_a_reference_without_words_is_cross_lingual(text: str | None) -> None:
    assert check(reference_text=text).reference_text == ""


def test_both_texts_are_normalised() -> None:
    request = check(target_text=" one\n two<|eos1|> ", reference_text="three\t four")
    assert (request.target_text, request.reference_text) == ("one two", "three four")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"target_text": None}, "target_text is missing"),
        ({"target_text": " "}, "target_text has nothing to speak"),
        ({"target_text": "<|s_1|><|eos1|>"}, "target_text has nothing to speak"),
        ({"target_text": "x" * 101}, "target_text has 101 characters"),
        ({"reference_text": "<|s_1|>"}, "reference_text has nothing to speak"),
        ({"reference_wav_len": 0}, "reference_wav_len 0"),
        ({"reference_wav": WAV[:100]}, "100 samples"),
        ({"reference_wav": None}, "reference_text 'reference' without a reference_wav"),
        ({"reference_wav": None, "reference_text": None, "reference_wav_len": 5}, "reference_wav_len 5 without"),
        ({"reference_wav": None, "reference_text": None}, "neither a reference_wav nor a speaker"),
        ({"speaker": "anna"}, "unknown speaker 'anna'"),
    ],
)
def test_bad_input_is_an_error_naming_the_value(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(**inputs)
