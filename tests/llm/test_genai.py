"""The CPU engine with a real converted model: batching, cancellation, seeds, and the conversion itself."""

import re
import shutil

import numpy as np
import pytest
import torch
from cosyvoice_triton.llm.engines.genai import GenAIModel
from cosyvoice_triton.llm.engines.interface import candidate_ids
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.prepare.genai import convert
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import Qwen2ForCausalLM

STREAMS = 8


def test_logits_of_a_fp32_conversion_equal_those_of_transformers(genai_dir, llm_dir):
    model = GenAIModel(genai_dir, rows=2, threads=1)
    ids = np.array([3, 300, 40, 777, 1500, 9])
    with torch.no_grad():
        expected = Qwen2ForCausalLM.from_pretrained(llm_dir, dtype=torch.float32)(torch.tensor(ids)[None]).logits[0]
    model.prefill(0, np.array([8, 8, 8]))
    found = [model.prefill(1, ids[:4])]
    model.move(1, 0, 4)
    found += [model.decode(ids[i : i + 1], np.array([i + 1]))[0] for i in (4, 5)]
    assert (model.logit_ids == candidate_ids(LLMTokenizer.from_dir(llm_dir))).all()
    np.testing.assert_allclose(found, expected[3:, model.logit_ids].numpy(), atol=1e-4)


def test_a_directory_that_was_not_converted_is_an_error(llm_dir):
    with pytest.raises(
        ValueError, match="genai_config.json: convert the HuggingFace directory as docs/llm.md describes"
    ):
        GenAIModel(llm_dir, rows=1)


def test_a_model_of_values_that_are_no_numbers_is_an_error(genai_dir, tmp_path):
    shutil.copytree(genai_dir, tmp_path / "nan")
    weights = tmp_path / "nan" / "model.onnx.data"
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    with pytest.raises(ValueError, match=r"model\.onnx: its logits are not finite"):
        GenAIModel(tmp_path / "nan", rows=1, threads=1)


def test_a_checkpoint_without_speech_tokens_is_not_converted(llm_dir, tmp_path):
    shutil.copytree(llm_dir, tmp_path / "text")
    (tmp_path / "text" / "tokenizer.json").write_text(Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).to_str())
    with pytest.raises(ValueError, match=re.escape("has no token <|s_0|>: not the tokenizer of a CosyVoice LLM")):
        convert(tmp_path / "text", tmp_path / "out", "int4")


@pytest.mark.slow
def test_the_bias_of_the_output_head_is_kept(llm_dir, genai_dir, tmp_path):
    """Qwen2 has no such bias, so transformers and the model builder drop it. This one is large beside rounding."""
    shutil.copytree(llm_dir, tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    bias = 1e4 * torch.randn(len(weights["lm_head.weight"]), generator=torch.Generator().manual_seed(0))
    save_file(weights | {"lm_head.bias": bias}, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    parts: list[str] = []
    convert(tmp_path / "hf", tmp_path / "with", "int4", parts.append)
    found = re.findall(r"reading layer \d+|reading lm head|saving|quantising", " ".join(parts))
    assert found[0] == "reading layer 0" and {"reading lm head", "quantising", "saving"} < set(found)
    assert len(parts) == len(found) == len(set(found))
    ids = np.array([3, 300, 40])
    biased, plain = (GenAIModel(of, rows=1, threads=1) for of in (tmp_path / "with", genai_dir))
    difference = biased.prefill(0, ids) - plain.prefill(0, ids)
    np.testing.assert_allclose(difference, bias[biased.logit_ids].numpy(), atol=10.0)


def test_converting_an_empty_directory_is_one_clear_error_and_leaves_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is not a HuggingFace model directory"):
        convert(tmp_path / "empty", tmp_path / "out", "int4")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_conversion_that_fails_midway_leaves_nothing(tmp_path, llm_dir, monkeypatch):
    monkeypatch.setattr("sys.executable", "false")
    with pytest.raises(RuntimeError, match="the model builder exited with 1"):
        convert(llm_dir, tmp_path / "out", "int4")
    assert list(tmp_path.iterdir()) == []
