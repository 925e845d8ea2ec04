"""Small ONNX networks with the inputs and outputs of the real ones: the outputs depend on all
inputs, so that a missing or duplicated input changes them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from cosyvoice_triton.stacks import Stack
from onnx import TensorProto

from tests.random_weights import speaker
from tests.random_weights.onnx_graph import OnnxGraph

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
    speaker.write_campplus(directory / stack.speaker_encoder, speaker.random_weights(0), "random weights")
    return directory


def write_estimator(path: Path) -> None:
    g = OnnxGraph()
    hidden = g.op("Mul", g.op("Sub", g.constant(1.0), "mask"), g.constant(-1e10))
    weights = g.op("Softmax", g.op("Add", "x", hidden), axis=2)
    g.op("Add", _velocity(g), weights, output="estimator_out")
    _save(g, path, ESTIMATOR, {"estimator_out": X})


def write_chunk(path: Path) -> None:
    g = OnnxGraph()
    g.op("Identity", _velocity(g), output="output")
    g.op("Neg", "cnn_cache", output="new_cnn_cache")
    some = g.op("Gather", "x", g.integers(*range(DEPTH * HEADS * HEAD_DIM)), axis=1)
    split = g.op("Reshape", some, g.integers(0, DEPTH, HEADS, HEAD_DIM, -1))  # (R, D, H, C, T)
    new = g.op("Transpose", split, perm=[1, 0, 2, 4, 3])  # (D, R, H, T, C)
    g.op("Concat", "att_cache", new, output="new_att_cache", axis=3)
    caches = {"new_cnn_cache": CACHES["cnn_cache"], "new_att_cache": (DEPTH, "R", HEADS, "K + T", HEAD_DIM)}
    _save(g, path, CHUNK, {"output": X, **caches})


def _velocity(g: OnnxGraph) -> str:
    """x + 2 mu + 3 cond + spks + a projection of the time's sine and cosine, (R, 80, T)."""
    frequencies = g.weight("frequencies", np.geomspace(1000, 1, 16))
    angle = g.op("Mul", g.op("Unsqueeze", "t", g.integers(1)), frequencies)
    embedding = g.op("Concat", g.op("Sin", angle), g.op("Cos", angle), axis=1)
    projection = g.weight("projection", np.random.default_rng(0).standard_normal((32, 80)) / 4)
    constant = g.op("Add", g.op("MatMul", embedding, projection), "spks")
    doubled, tripled = g.op("Mul", "mu", g.constant(2.0)), g.op("Mul", "cond", g.constant(3.0))
    return g.op("Sum", "x", doubled, tripled, g.op("Unsqueeze", constant, g.integers(2)))


def _save(g: OnnxGraph, path: Path, inputs: Mapping[str, Dims], outputs: Mapping[str, Dims]) -> None:
    values = ([(name, TensorProto.FLOAT, dims) for name, dims in of.items()] for of in (inputs, outputs))
    g.save(path, *values, "a network for tests")
