"""A HuggingFace LLM directory converted for the onnxruntime_genai engine."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cosyvoice_triton.llm.checkpoint import read_head_bias
from cosyvoice_triton.llm.engines.interface import candidate_ids
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer

PRECISIONS = ("int4", "int8", "fp32")  # of the weights; the first is the default
# What the model builder says when a part begins. It prints a line for each matrix, too, and progress bars.
_STAGES = re.compile(r"Reading (?:layer \d+|LM head)|(start to quantize)|Saving ONNX model")

_BUILDER = "onnxruntime_genai.models.builder"
# The one for Python 3.10 reads `rope_theta`, which transformers has in `rope_parameters`, or takes 10,000.
_OLD_BUILDER = f"""
import runpy
from transformers import Qwen2Config
Qwen2Config.rope_theta = property(lambda config: config.rope_parameters.get("rope_theta"))
runpy.run_module("{_BUILDER}", run_name="__main__", alter_sys=True)
"""


def convert(model_dir: Path, output_dir: Path, precision: str, announce: Callable[[str], None] | None = None) -> bool:
    """Write `output_dir` atomically; False if it exists already. announce: takes a line for each part that begins.

    ValueError if `model_dir` is not a CosyVoice LLM or `output_dir` is something else, RuntimeError on failure.
    """
    if (output_dir / "genai_config.json").is_file():
        return False
    if not (model_dir / "config.json").is_file():
        raise ValueError(f"{model_dir} is not a HuggingFace model directory: it has no config.json")
    candidates = candidate_ids(LLMTokenizer.from_dir(model_dir))
    if candidates[-1] - candidates[0] >= len(candidates):
        raise ValueError(f"{model_dir}: its end tokens do not follow its speech tokens")
    if output_dir.exists():
        raise ValueError(f"{output_dir} exists and is not a conversion; remove it or choose another directory")
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    # Next to the result, so that the rename stays within one file system.
    with tempfile.TemporaryDirectory(dir=output_dir.parent, prefix=f".{output_dir.name}.") as scratch:
        built = Path(scratch) / "model"
        _build(model_dir, built, Path(scratch) / "cache", precision, announce or (lambda line: None))
        _keep_speech_logits(built, slice(int(candidates[0]), int(candidates[-1]) + 1), read_head_bias(model_dir))
        built.rename(output_dir)
    return True


def _build(model_dir: Path, built: Path, cache: Path, precision: str, announce: Callable[[str], None]) -> None:
    command = [sys.executable, *(["-c", _OLD_BUILDER] if sys.version_info < (3, 11) else ["-m", _BUILDER])]
    command += ["-i", str(model_dir), "-o", str(built), "-p", precision, "-e", "cpu", "-c", str(cache)]
    # Serving reads only the logits of the last position; those of a long prompt take 100 MB at the official vocabulary.
    command += ["--extra_options", "prune_lm_head=true"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    started, printed, told = time.monotonic(), [], set[str]()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as builder:
        assert builder.stdout is not None
        for line in builder.stdout:
            printed.append(line)
            if (found := _STAGES.search(line)) and (stage := "Quantising" if found[1] else found[0]) not in told:
                told.add(stage)
                announce(f"{stage.lower()} ({time.monotonic() - started:.0f} s)")
    if builder.returncode:
        print("".join(printed), file=sys.stderr)
        raise RuntimeError(f"the model builder exited with {builder.returncode} on {model_dir}")


def _keep_speech_logits(built: Path, ids: slice, bias: np.ndarray | None) -> None:
    """Reduce the output head of the model in `built` to these ids, and add their bias."""
    import onnx
    from onnx import helper, numpy_helper

    path, config_path = built / "model.onnx", built / "genai_config.json"
    model = onnx.load(path)
    graph = model.graph
    (head,) = (node for node in graph.node if "logits" in node.output)
    if head.op_type not in ("MatMul", "MatMulNBits"):
        raise RuntimeError(f"the model builder made an output head of {head.op_type}, not a matrix product")
    quantised, width = head.op_type == "MatMulNBits", ids.stop - ids.start
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for index, name in enumerate(head.input):
        if name in weights:
            matrix = numpy_helper.to_array(weights[name])  # quantised: (V, blocks, ...), else (hidden, V)
            kept = matrix[ids] if quantised else matrix[:, ids]
            # Under a new name: a tied embedding reads the whole matrix.
            head.input[index] = f"{name}.speech"
            graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(kept), head.input[index]))
            if not any(name in node.input for node in graph.node):
                graph.initializer.remove(weights[name])
    for attribute in head.attribute:
        if attribute.name == "N":
            attribute.i = width
    if bias is not None:
        head.output[0] = "logits_without_bias"
        graph.initializer.append(numpy_helper.from_array(bias[ids].astype(np.float32), "lm_head.bias"))
        graph.node.append(helper.make_node("Add", ["logits_without_bias", "lm_head.bias"], ["logits"]))
    (output,) = (value for value in graph.output if value.name == "logits")
    output.type.tensor_type.shape.dim[-1].dim_value = width
    del graph.value_info[:]  # the inferred shapes; those of the head are no longer valid
    path.unlink()
    path.with_name("model.onnx.data").unlink()
    onnx.save(model, path, save_as_external_data=True, location="model.onnx.data")
    path.with_name("model.onnx.data").chmod(0o644)  # like the other files; onnx makes it readable by the owner only
    config = json.loads(config_path.read_text())
    config["model"]["first_logit_id"] = ids.start
    config_path.write_text(json.dumps(config, indent=4) + "\n")
