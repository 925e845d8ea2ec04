import dataclasses
import time
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton.config import OrchestratorConfig
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.llm.interface import Sampling, preset_values
from cosyvoice_triton.orchestrator.request import RequestRules, SynthesisRequest, default_sampling

WAV = np.sin(np.arange(PROMPT_SAMPLE_RATE, dtype=np.float32))


def check(defaults: Sampling | None = None, **inputs: Any) -> SynthesisRequest:
    given = {"target_text": "hello", "reference_wav": WAV, "reference_text": "reference"} | inputs
    return RequestRules(sampling=defaults or Sampling(), max_text_chars=100).request(**given)


def test_parameters_replace_the_defaults_and_those_of_triton_are_ignored() -> None:
    defaults = Sampling(temperature=0.5, max_tokens=99)
    assert check(defaults).sampling == defaults and check(defaults).max_tokens is None
    parameters = {"seed": 7, "temperature": 0, "top_p": "0.5", "top_k": 3, "repetition_penalty": 1.5, "max_tokens": "9"}
    sampling = check(parameters=parameters | {"triton_enable_empty_final_response": True, "speed": 1}).sampling
    assert sampling == Sampling(seed=7, temperature=0.0, top_p=0.5, top_k=3, repetition_penalty=1.5, max_tokens=9)

    assert check(defaults, parameters=parameters).max_tokens == 9
    with pytest.raises(ValueError, match="request parameter 'temprature' is unknown; known: .*temperature"):
        check(parameters={"temprature": 0.5})


def test_what_is_not_to_be_spelled_out_or_not_played_is_chosen_by_flags() -> None:
    assert check().as_is == frozenset() and check().played and not check(parameters={"played": False}).played
    spelled = {"url_normalization": "false", "phone_normalization": False}
    assert check(parameters=spelled).as_is == spelled.keys()
    with pytest.raises(ValueError, match="email_normalization must be true or false"):
        check(parameters={"email_normalization": "no"})


def test_a_preset_replaces_the_defaults_and_single_parameters_replace_its_values() -> None:
    cosyvoice2 = Sampling(temperature=1.0, top_p=0.8, top_k=25, repetition_penalty=1.0, ras_window=10, ras_tau=0.1)
    assert check(Sampling(top_k=9), parameters={"sampling": "cosyvoice2"}).sampling == cosyvoice2
    defaults = dataclasses.replace(cosyvoice2, max_tokens=99)
    sampling = check(defaults, parameters={"top_k": 7, "sampling": "triton", "ras_tau": "0.5"}).sampling
    assert sampling == Sampling(top_k=7, ras_tau=0.5, max_tokens=99)
    with pytest.raises(ValueError, match="sampling 'best' is not a preset; there are cosyvoice2, triton"):
        check(parameters={"sampling": "best"})


SERVERS = {"llm_transport": "openai", "llm_urls": ("http://a",)}


@pytest.mark.parametrize(
    ("settings", "expected", "warned"),
    [
        ({"sampling": "triton"}, Sampling(), False),
        ({"sampling": "triton", "max_tokens": 9}, Sampling(max_tokens=9), False),
        ({"sampling": "cosyvoice2"}, Sampling(**preset_values("cosyvoice2")), False),
        ({"sampling": "cosyvoice2", "llm_backend": "tensorrtllm"}, Sampling(), True),
        ({"sampling": "triton", "llm_backend": "tensorrtllm"}, Sampling(), False),
        ({"sampling": "cosyvoice2", "max_tokens": 9, **SERVERS}, Sampling(max_tokens=9), True),
        ({"sampling": "cosyvoice2", "llm_dialect": "chat", **SERVERS}, Sampling(), True),
        ({"sampling": "cosyvoice2", "llm_dialect": "vllm", **SERVERS}, Sampling(**preset_values("cosyvoice2")), False),
    ],
)
def test_the_default_sampling_is_one_that_the_llm_can_run(settings, expected, warned, caplog) -> None:
    assert default_sampling(OrchestratorConfig(model_dir="/m", **settings)) == expected
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned


BAD: dict[str, tuple[object, ...]] = {"seed": (-1, "abc", True), "temperature": (float("nan"), -0.5), "top_p": (0, 1.5)}
BAD |= {"top_k": (2.5,), "repetition_penalty": (0,), "max_tokens": (0, "7.5"), "speed": (4.5, "fast")}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD for value in BAD[name]])
def test_a_bad_parameter_is_an_error_naming_it_and_its_value(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name) as error:
        check(parameters={name: value})
    assert str(value) in str(error.value)


def test_the_padding_after_the_reference_is_cut_off() -> None:
    padded = np.concatenate([WAV, np.full(5000, np.nan, np.float32)])[None]
    np.testing.assert_array_equal(check(reference_wav=padded, reference_wav_len=len(WAV)).voice.wav, WAV)
    np.testing.assert_array_equal(check(reference_wav=WAV, reference_wav_len=None).voice.wav, WAV)


def test_every_text_is_cleaned_and_a_reference_without_a_transcript_is_cross_lingual() -> None:
    assert [check(reference_text=text).voice.text for text in (None, "", "  \n")] == [""] * 3
    request = check(target_text=" one\n two<|eos1|> ", reference_text="three\t\nfour")
    assert (request.target_text, request.voice.text) == ("one\ntwo", "three four")
    assert check(instruct_text="<|endofprompt|>slowly\n please", reference_text="").instruct_text == "slowly please"


def test_an_instruction_before_the_text_is_the_request_s_instruction() -> None:
    text = "You are a helpful assistant. Speak sadly.<|endofprompt|>Hello."
    request = check(target_text=text, reference_text="")
    assert (request.target_text, request.instruct_text) == ("Hello.", "Speak sadly.")
    system = check(target_text="You are a helpful assistant.<|endofprompt|>Hello.")
    assert (system.target_text, system.instruct_text) == ("Hello.", "")
    told = check(instruct_text="You are a helpful assistant. Slowly.<|endofprompt|>", reference_text="")
    assert told.instruct_text == "You are a helpful assistant. Slowly."  # the prompt's own words are added once
    loudly = "You are a helpful assistant. Loudly.<|endofprompt|>"
    for other in ({"instruct_text": "Loudly.", "reference_text": ""}, {"reference_text": f"{loudly}Said."}):
        with pytest.raises(ValueError, match="'Speak sadly.'"):
            check(target_text=text, **other)


@pytest.mark.parametrize(
    ("given", "transcript", "instruction"),
    [
        ("You are a helpful assistant. Loudly.<|endofprompt|>Said.", "Said.", "Loudly."),
        ("You are a helpful assistant.<|endofprompt|>Said.", "Said.", ""),
        ("You are a helpful assistant.<|endofprompt|>", "", ""),
        ("Loudly.<|endofprompt|>", "", "Loudly."),
    ],
)
def test_an_instruction_before_the_transcript_is_followed_and_system_words_are_none(given, transcript, instruction):
    request = check(reference_text=given)
    assert (request.voice.text, request.instruct_text) == (transcript, instruction)
    both = check(reference_text="Said.", instruct_text="Loudly.")
    assert (both.voice.text, both.instruct_text) == ("Said.", "Loudly.")


def test_a_request_without_a_recording_names_a_speaker_or_means_the_default_voice() -> None:
    for speaker, voice in (("anna", "anna"), ("", None), (None, None)):
        assert RequestRules().request("hello", speaker=speaker).voice == voice


@pytest.mark.parametrize(("value", "flag"), [(True, True), ("false", False), ("True", True), (0, False), ("1", True)])
def test_flags_may_be_text(value: object, flag: bool) -> None:
    request = check(parameters={"text_frontend": value, "cross_lingual": value}, reference_text="")
    assert (request.normalize, request.cross_lingual) == (flag, flag)


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
        ({"speaker": "anna"}, "speaker 'anna' with a reference_wav"),
        ({"speaker": "anna", "reference_wav": None}, "reference_text 'reference' without a reference_wav"),
        ({"instruct_text": "<|s_1|>", "reference_text": ""}, "instruct_text has nothing to speak"),
        ({"instruct_text": "x" * 101, "reference_text": ""}, "instruct_text has 101 characters"),
        ({"parameters": {"cross_lingual": True}}, "cross_lingual with the reference_text 'reference'"),
        (
            {"parameters": {"cross_lingual": True}, "instruct_text": "sadly"},
            "cross_lingual with the instruct_text 'sadly'",
        ),
        ({"parameters": {"cross_lingual": "perhaps"}}, "cross_lingual must be true or false, not 'perhaps'"),
        ({"parameters": {"text_frontend": 2}}, "text_frontend must be true or false, not 2"),
    ],
)
def test_bad_input_is_an_error_naming_the_value(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(**inputs)


@pytest.mark.parametrize("char", ["a", "\u0301", "<|", "[", "\n"])
def test_a_parameter_that_is_too_long_is_refused_at_once_whatever_it_is(char: str) -> None:
    """It may have any size that gRPC takes, as a tensor: tests/system/test_tensor_limits.py."""
    text = char * (4 << 20)
    begun = time.process_time()
    for _ in range(1000):
        with pytest.raises(ValueError, match=r"has \d+ characters, more than the limit of 2097152$"):
            check(parameters={"language": text})
    assert time.process_time() - begun < 4.0  # a second of CPU for all 4 GB of them, here
