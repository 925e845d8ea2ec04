"""The conversion for TensorRT-LLM with a strict fake of its API, and the error message if it is not installed."""

import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cosyvoice_triton.cli.convert_checkpoint import main


@dataclass(kw_only=True)
class Mapping:
    world_size: int
    rank: int = 0
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    attn_tp_size: int = 0
    attn_cp_size: int = 0


@pytest.fixture
def converted(monkeypatch) -> list[tuple[Any, ...]]:
    """What was converted: mapping, dtype, quantisation, and whether the configuration was written."""
    made: list[tuple[Any, ...]] = []

    def from_hugging_face(
        hf_model_or_dir: str,
        dtype: str,
        *,
        mapping: Mapping,
        quant_config: types.SimpleNamespace,
        use_parallel_embedding: bool,
        embedding_sharding_dim: int,
        disable_weight_only_quant_plugin: bool,
        load_model_on_cpu: bool,
    ) -> types.SimpleNamespace:
        def save_checkpoint(output_dir: str, save_config: bool = True) -> None:
            assert Path(output_dir).is_dir()
            made.append((mapping, dtype, quant_config.quant_algo, save_config))

        return types.SimpleNamespace(config=types.SimpleNamespace(mapping=mapping), save_checkpoint=save_checkpoint)

    model = types.SimpleNamespace(from_hugging_face=from_hugging_face)
    quantisation = lambda quant_algo=None: types.SimpleNamespace(quant_algo=quant_algo)  # noqa: E731
    modules = {
        "tensorrt_llm": {},
        "tensorrt_llm.mapping": {"Mapping": Mapping},
        "tensorrt_llm.models": {"QWenForCausalLM": model},
        "tensorrt_llm.models.modeling_utils": {"QuantConfig": quantisation},
        "tensorrt_llm.quantization": {"QuantAlgo": types.SimpleNamespace(W4A16="W4A16")},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return made


def run(llm_dir, tmp_path, *options):
    return main(["--model_dir", str(llm_dir), "--output_dir", str(tmp_path / "weights"), *options])


def test_every_rank_is_converted_and_one_rank_writes_the_configuration(converted, llm_dir, tmp_path):
    options = ["--tp_size", "2", "--pp_size", "2", "--cp_size", "3", "--workers", "2", "--dtype", "bfloat16"]
    options += ["--use_weight_only", "--weight_only_precision", "int4"]
    assert run(llm_dir, tmp_path, *options) == 0
    mappings = sorted((mapping for mapping, *_ in converted), key=lambda mapping: mapping.rank)
    assert [mapping.rank for mapping in mappings] == [0, 1, 2, 3]
    assert {(m.world_size, m.tp_size, m.pp_size, m.cp_size) for m in mappings} == {(12, 2, 2, 3)}
    assert sorted(save for *_, save in converted) == [False, False, False, True]
    assert {each[1:3] for each in converted} == {("bfloat16", "W4A16")}


def test_without_tensorrt_llm_the_error_names_the_image_that_has_it(llm_dir, tmp_path, capsys):
    assert run(llm_dir, tmp_path) == 1
    error = capsys.readouterr().err
    assert "No module named 'tensorrt_llm'" in error and "trtllm-python-py3" in error
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_an_llm_is_refused(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    assert run(tmp_path / "model", tmp_path) == 1
    assert "no file" in capsys.readouterr().err
