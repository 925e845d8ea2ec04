"""Settings parsed from Triton's arguments, and their defaults."""

import json

import pytest
from cosyvoice_triton.config import (
    AudioTokenizerConfig,
    OrchestratorConfig,
    TensorrtLLMConfig,
    Token2WavConfig,
    format_setting,
    parse_setting,
)
from cosyvoice_triton.llm.interface import LengthRatios, Sampling, Timeouts, preset_values
from cosyvoice_triton.orchestrator.chunking import HopRules


def triton_args(parameters: dict[str, str], *, decoupled: bool = False, kind: str = "CPU") -> dict[str, str]:
    config = {
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
        "model_transaction_policy": {"decoupled": decoupled},
    }
    return {"model_config": json.dumps(config), "model_instance_kind": kind, "model_instance_device_id": "1"}


def test_parameters_take_the_types_of_their_fields_and_others_come_from_the_instance():
    config = Token2WavConfig.from_triton(
        triton_args({"model_dir": "/m", "n_timesteps": "5", "idle_seconds": "1.5"}, kind="GPU")
    )
    assert config == Token2WavConfig(model_dir="/m", n_timesteps=5, idle_seconds=1.5, device="cuda:1")
    assert AudioTokenizerConfig.from_triton(triton_args({"model_dir": "/m"})).device == "cpu"
    llm = TensorrtLLMConfig.from_triton(triton_args({"gpt_model_path": "/e", "max_beam_width": "1"}))
    assert llm.engine_dir == "/e", "and those of the C++ backend are ignored"
    for text in ("http://a:8000/v1 http://b", "http://a:8000/v1, http://b "):
        given = {"model_dir": "/m", "llm_transport": "openai", "llm_urls": text}
        assert OrchestratorConfig.from_triton(triton_args(given)).llm_urls == ("http://a:8000/v1", "http://b")
    for decoupled in (True, False):
        assert (
            OrchestratorConfig.from_triton(triton_args({"model_dir": "/m"}, decoupled=decoupled)).decoupled is decoupled
        )


@pytest.mark.parametrize(
    ("kind", "has_gpu", "device"),
    [
        ("KIND_AUTO", True, "cuda:0"),
        ("KIND_AUTO", False, "cpu"),
        ("KIND_CPU", True, "cpu"),
        ("KIND_GPU", False, "cuda:0"),
    ],
)
def test_token2wav_computes_where_its_parameter_says(kind, has_gpu, device, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    given = {"model_dir": "/m", "instance_kind": kind}
    assert Token2WavConfig.from_triton(triton_args(given)).device == device
    with pytest.raises(ValueError, match="there is no GPU 2: this server sees 2"):
        Token2WavConfig.from_triton(triton_args(given | {"instance_kind": "KIND_GPU", "token2wav_gpus": "2"}))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "'model_dir' is missing"),
        ({"model_dir": ""}, "'model_dir' is missing or empty"),
        ({"model_dir": "${model_dir}"}, "'model_dir' was never filled in: '\\${model_dir}'"),
        ({"model_dir": "/m", "colour": "red"}, "unknown parameter 'colour' \\(value 'red'\\)"),
        ({"model_dir": "/m", "max_tokens": "many"}, "'max_tokens' must be an integer, not 'many'"),
        ({"model_dir": "/m", "max_tokens": "0"}, "'max_tokens' must be above 0, not 0"),
        ({"model_dir": "/m", "sampling": "best"}, "'sampling' must be one of cosyvoice2, triton, not 'best'"),
        ({"model_dir": "/m", "llm_transport": "pigeon"}, "must be one of triton, openai, not 'pigeon'"),
        ({"model_dir": "/m", "llm_transport": "openai"}, "'llm_urls' is empty"),
        ({"model_dir": "/m", "token2wav_gpus": "1 x"}, "'token2wav_gpus' must be an integer, not 'x'"),
    ],
)
def test_a_bad_parameter_is_reported_with_its_value(parameters, message):
    with pytest.raises(ValueError, match=message):
        OrchestratorConfig.from_triton(triton_args(parameters))


@pytest.mark.parametrize(("value", "kind"), [(True, bool), (False, bool), (3, int | None), (None, int | None)])
def test_values_are_read_back_from_their_text(value, kind):
    assert parse_setting("name", format_setting(value), kind) == value
    with pytest.raises(ValueError, match="'name' must be (true or false|an integer), not 'maybe'"):
        parse_setting("name", "maybe", kind)


def test_policy_objects_have_the_defaults_of_the_settings() -> None:
    """Defaults are defined in `config` only; objects that tools and tests build without it must not differ."""
    config = OrchestratorConfig(model_dir="/m")
    assert Sampling() == Sampling(**preset_values("triton"), max_tokens=config.max_tokens)
    assert LengthRatios() == LengthRatios(min=config.min_token_ratio, max=config.max_token_ratio)
    assert Timeouts() == Timeouts(first_token=config.token_timeout, token=config.token_timeout)
    rules = HopRules(
        strategy=config.dynamic_chunk_strategy,
        first_hop=config.first_hop_tokens,
        short_first_hop=config.short_first_hop_tokens,
        max_hop=config.max_hop_tokens,
    )
    assert HopRules() == rules
