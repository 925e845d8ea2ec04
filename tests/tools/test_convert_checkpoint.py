"""The conversion for TensorRT-LLM with a strict fake of its API, and the error message if it is not installed."""

import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from cosyvoice_triton.cli.convert_checkpoint import main

from tests.support.llm_fixtures import llm_dir  # noqa: F401


@dataclass(kw_only=True)
class Mapping:
    world_size: int
    rank: int = 0
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    attn_tp_size: int = 0
    attn_cp_size: int = 0


@dataclass
class QuantConfig:
    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    group_size: int = 128
    smoothquant_val: float = 0.5
    has_zero_point: bool = False
    pre_quant_scale: bool = False


@dataclass
class QWenForCausalLM:
    """Records conversions; options that the real class does not have are errors."""

    model_dir: str
    dtype: str
    config: types.SimpleNamespace
    quant_config: QuantConfig
    converted: ClassVar[list[tuple[Any, ...]]] = []
    quantised: ClassVar[list[dict[str, Any]]] = []

    @classmethod
    def from_hugging_face(
        cls,
        hf_model_or_dir: str,
        dtype: str,
        *,
        mapping: Mapping,
        quant_config: QuantConfig,
        use_parallel_embedding: bool,
        embedding_sharding_dim: int,
        disable_weight_only_quant_plugin: bool,
        load_model_on_cpu: bool,
    ) -> "QWenForCausalLM":
        return cls(hf_model_or_dir, dtype, types.SimpleNamespace(mapping=mapping), quant_config)

    def save_checkpoint(self, output_dir: str, save_config: bool = True) -> None:
        assert Path(output_dir).is_dir()
        self.converted.append((self.config.mapping, self.dtype, self.quant_config, save_config))

    @classmethod
    def quantize(
        cls,
        hf_model_dir: str,
        output_dir: str,
        *,
        dtype: str,
        mapping: Mapping,
        quant_config: QuantConfig,
        calib_dataset: str,
        use_parallel_embedding: bool,
        embedding_sharding_dim: int,
        disable_weight_only_quant_plugin: bool,
    ) -> None:
        cls.quantised.append({"mapping": mapping, "quant_config": quant_config, "calib_dataset": calib_dataset})


ALGORITHMS = (
    *("W8A16", "W4A16", "W4A16_GPTQ", "INT8", "W8A8_SQ_PER_TENSOR_PLUGIN", "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN"),
    *("W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN", "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"),
)


@dataclass
class Installed:
    converted: list[tuple[Any, ...]] = field(default_factory=list)
    quantised: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture
def tensorrt_llm(monkeypatch):
    made = {
        "tensorrt_llm": {},
        "tensorrt_llm.mapping": {"Mapping": Mapping},
        "tensorrt_llm.models": {"QWenForCausalLM": QWenForCausalLM},
        "tensorrt_llm.models.modeling_utils": {"QuantConfig": QuantConfig},
        "tensorrt_llm.quantization": {"QuantAlgo": types.SimpleNamespace(**{name: name for name in ALGORITHMS})},
    }
    for name, content in made.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    installed = Installed()
    monkeypatch.setattr(QWenForCausalLM, "converted", installed.converted)
    monkeypatch.setattr(QWenForCausalLM, "quantised", installed.quantised)
    return installed


def run(llm_dir, tmp_path, *options):  # noqa: F811
    return main(["--model_dir", str(llm_dir), "--output_dir", str(tmp_path / "weights"), *options])


def test_every_rank_is_converted_and_one_rank_writes_the_configuration(tensorrt_llm, llm_dir, tmp_path):  # noqa: F811
    options = ["--tp_size", "2", "--pp_size", "2", "--cp_size", "3", "--workers", "2", "--dtype", "bfloat16"]
    assert run(llm_dir, tmp_path, *options) == 0
    mappings = sorted((mapping for mapping, *_ in tensorrt_llm.converted), key=lambda mapping: mapping.rank)
    assert [mapping.rank for mapping in mappings] == [0, 1, 2, 3]
    assert {(m.world_size, m.tp_size, m.pp_size, m.cp_size) for m in mappings} == {(12, 2, 2, 3)}
    assert sorted(save for *_, save in tensorrt_llm.converted) == [False, False, False, True]
    assert {dtype for _, dtype, *_ in tensorrt_llm.converted} == {"bfloat16"}


@pytest.mark.parametrize(
    ("options", "algorithm"),
    [
        (["--use_weight_only", "--weight_only_precision", "int4_gptq"], "W4A16_GPTQ"),
        (["--smoothquant", "0.5", "--per_token"], "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN"),
        (["--smoothquant", "0.5", "--per_channel"], "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN"),
    ],
)
def test_each_quantisation_has_its_algorithm(tensorrt_llm, llm_dir, tmp_path, options, algorithm):  # noqa: F811
    assert run(llm_dir, tmp_path, *options) == 0
    found = [call["quant_config"] for call in tensorrt_llm.quantised] or [of[2] for of in tensorrt_llm.converted]
    assert [each.quant_algo for each in found] == [algorithm]


def test_two_quantisation_options_exclude_each_other(tensorrt_llm, llm_dir, tmp_path, capsys):  # noqa: F811
    assert run(llm_dir, tmp_path, "--use_weight_only", "--smoothquant", "0.5") == 1
    assert "exclude each other" in capsys.readouterr().err


def test_without_tensorrt_llm_the_error_names_the_image_that_has_it(llm_dir, tmp_path, capsys):  # noqa: F811
    assert run(llm_dir, tmp_path) == 1
    error = capsys.readouterr().err
    assert "No module named 'tensorrt_llm'" in error and "trtllm-python-py3" in error
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_an_llm_is_refused(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    assert run(tmp_path / "model", tmp_path) == 1
    assert "no file" in capsys.readouterr().err
