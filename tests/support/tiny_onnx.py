"""Small ONNX networks with the inputs and outputs of the real ones: the outputs depend on all
inputs, so that a missing or duplicated input changes them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from cosyvoice_triton.stacks import Stack
from onnx import NodeProto, TensorProto, helper, numpy_helper

DEPTH, HEADS, HEAD_DIM = 2, 2, 4
Dims = Sequence[int | str]

X, SPEAKER = ("R", 80, "T"), ("R", 80)
ESTIMATOR: dict[str, Dims] = {"x": X, "mask": ("R", 1, "T"), "mu": X, "t": ("R",), "spks": SPEAKER, "cond": X}
CACHES: dict[str, Dims] = {"cnn_cache": (DEPTH, "R", 8, 2), "att_cache": (DEPTH, "R", HEADS, "K", HEAD_DIM)}
CHUNK = {name: dims for name, dims in ESTIMATOR.items() if name != "mask"} | CACHES


def write_stack(directory: Path, stack: Stack) -> Path:
    """All ONNX files of a stack."""
    directory.mkdir(parents=True, exist_ok=True)
    for use, file in stack.networks.items():
        (write_chunk if use in ("prompt", "chunk") else write_estimator)(directory / file)
    write_speaker(directory / stack.speaker_encoder)
    return directory


def write_estimator(path: Path, rows: int | str = "R") -> None:
    inputs = {name: tuple(rows if dim == "R" else dim for dim in dims) for name, dims in ESTIMATOR.items()}
    nodes = [
        *_velocity(),
        helper.make_node("Sub", ["one", "mask"], ["hidden"], "hide"),
        helper.make_node("Mul", ["hidden", "minus_infinity"], ["bias"], "bias"),
        helper.make_node("Add", ["x", "bias"], ["masked"], "masked"),
        helper.make_node("Softmax", ["masked"], ["weights"], "softmax", axis=2),
        helper.make_node("Add", ["velocity", "weights"], ["estimator_out"], "out"),
    ]
    _save(path, nodes, inputs, {"estimator_out": (rows, 80, "T")}, {"one": 1.0, "minus_infinity": -1e10})


def write_chunk(path: Path) -> None:
    nodes = [
        *_velocity(),
        helper.make_node("Identity", ["velocity"], ["output"], "output"),
        helper.make_node("Neg", ["cnn_cache"], ["new_cnn_cache"], "convolutions"),
        helper.make_node("Gather", ["x", "channels"], ["some"], "some", axis=1),
        helper.make_node("Reshape", ["some", "apart"], ["split"], "split"),  # (R, D, H, C, T)
        helper.make_node("Transpose", ["split"], ["new"], "new", perm=[1, 0, 2, 4, 3]),  # (D, R, H, T, C)
        helper.make_node("Concat", ["att_cache", "new"], ["new_att_cache"], "attention", axis=3),
    ]
    outputs = {
        "output": X,
        "new_cnn_cache": CACHES["cnn_cache"],
        "new_att_cache": (DEPTH, "R", HEADS, "K + T", HEAD_DIM),
    }
    integers = {"channels": np.arange(DEPTH * HEADS * HEAD_DIM), "apart": np.array([0, DEPTH, HEADS, HEAD_DIM, -1])}
    _save(path, nodes, CHUNK, outputs, integers)


def write_speaker(path: Path) -> None:
    nodes = [
        helper.make_node("ReduceMean", ["input", "time"], ["mean"], "mean", keepdims=0),
        helper.make_node("MatMul", ["mean", "matrix"], ["output"], "output"),
    ]
    matrix = np.random.default_rng(1).standard_normal((80, 192)) / 9
    _save(path, nodes, {"input": ("B", "T", 80)}, {"output": ("B", 192)}, {"time": np.array([1]), "matrix": matrix})


def _velocity() -> list[NodeProto]:
    """x + 2 mu + 3 cond + spks + a projection of the time's sine and cosine, (R, 80, T)."""
    return [
        helper.make_node("Unsqueeze", ["t", "last"], ["column"], "column"),
        helper.make_node("Mul", ["column", "frequencies"], ["angle"], "angle"),
        helper.make_node("Sin", ["angle"], ["sine"], "sine"),
        helper.make_node("Cos", ["angle"], ["cosine"], "cosine"),
        helper.make_node("Concat", ["sine", "cosine"], ["embedding"], "embedding", axis=1),
        helper.make_node("MatMul", ["embedding", "projection"], ["time"], "time"),
        helper.make_node("Add", ["time", "spks"], ["constant"], "constant"),
        helper.make_node("Unsqueeze", ["constant", "last2"], ["constant3"], "constant3"),
        helper.make_node("Mul", ["mu", "two"], ["mu2"], "mu2"),
        helper.make_node("Mul", ["cond", "three"], ["cond3"], "cond3"),
        helper.make_node("Sum", ["x", "mu2", "cond3", "constant3"], ["velocity"], "velocity"),
    ]


def _save(
    path: Path,
    nodes: list[NodeProto],
    inputs: Mapping[str, Dims],
    outputs: Mapping[str, Dims],
    constants: Mapping[str, np.ndarray | float],
) -> None:
    shared = {
        "frequencies": np.geomspace(1000, 1, 16),
        "projection": np.random.default_rng(0).standard_normal((32, 80)) / 4,
        "two": 2.0,
        "three": 3.0,
        "last": np.array([1]),
        "last2": np.array([2]),
    }
    used = {name for node in nodes for name in node.input}
    tensors = []
    for name, value in {**shared, **constants}.items():
        array = np.asarray(value)
        if name in used:
            array = array if array.dtype == np.int64 else array.astype(np.float32)
            tensors.append(numpy_helper.from_array(array, name))
    graph = helper.make_graph(
        nodes,
        path.stem,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in outputs.items()],
        tensors,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
