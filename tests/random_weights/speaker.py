"""A small substitute for CAM++ with the official ONNX interface: `input` (B, T, 80) to `output` (B, 192).

Convolutions and statistics pooling: far smaller than CAM++. Even with random weights its output depends on the
voice. Weights have the keys of `demo_voice.training.speaker.DemoSpeakerEncoder`.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from cosyvoice_triton.constants import MEL_BINS, SPEAKER_DIM
from onnx import TensorProto

from tests.random_weights.onnx_graph import OnnxGraph

CHANNELS, KERNEL = 64, 5  # with random weights
KERNEL_SPREAD = 0.012  # log mel features have a standard deviation of 3; keep sums in tanh's range


def random_weights(seed: int) -> dict[str, np.ndarray]:
    """Return one convolution; the projection subtracts 0.5 from standard deviations, to centre them like means."""
    rng = np.random.default_rng(seed)
    kernel = rng.normal(0, KERNEL_SPREAD, (CHANNELS, MEL_BINS, KERNEL))
    project = rng.normal(0, 1, (SPEAKER_DIM, 2 * CHANNELS))
    return {
        "convs.0.weight": kernel,
        "convs.0.bias": np.zeros(CHANNELS),
        "project.weight": project,
        "project.bias": -0.5 * project[:, CHANNELS:].sum(axis=1),
    }


def write_campplus(path: Path, weights: Mapping[str, np.ndarray], about: str) -> None:
    """Write the ONNX file. Convolution i has dilation i + 1. about: doc string of the file."""
    g = OnnxGraph()

    def half(key: str, value: np.ndarray) -> str:
        return g.op("Cast", g.half_weight(key, value), to=TensorProto.FLOAT)

    x = g.op("Transpose", "input", perm=[0, 2, 1])  # (B, T, 80) -> (B, 80, T)
    for i in range(sum(key.startswith("convs.") for key in weights) // 2):
        kernel, bias = (f"convs.{i}.{part}" for part in ("weight", "bias"))
        size = weights[kernel].shape[2]
        pad = size // 2 * (i + 1)
        inputs = x, half(kernel, weights[kernel]), g.weight(bias, weights[bias])
        x = g.op("Tanh", g.op("Conv", *inputs, pads=[pad, pad], kernel_shape=[size], dilations=[i + 1]))
    mean = g.op("ReduceMean", x, g.integers(-1), keepdims=1)
    deviation = g.op("Sub", x, mean)
    variance = g.op("ReduceMean", g.op("Mul", deviation, deviation), g.integers(-1), keepdims=0)
    # As in training, where the constant keeps the gradient of the square root finite.
    spread = g.op("Sqrt", g.op("Add", variance, g.constant(1e-6)))
    pooled = g.op("Concat", g.op("Squeeze", mean, g.integers(-1)), spread, axis=-1)  # (B, 2 * channels)
    project = half("project.weight", weights["project.weight"].T)
    bias = g.weight("project.bias", weights["project.bias"])
    g.op("Add", g.op("MatMul", pooled, project), bias, output="output")
    sound, x_vector = ["B", "T", MEL_BINS], ["B", SPEAKER_DIM]
    g.save(path, [("input", TensorProto.FLOAT, sound)], [("output", TensorProto.FLOAT, x_vector)], about)
