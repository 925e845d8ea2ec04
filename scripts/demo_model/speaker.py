"""A random-weight stand-in for CAM++ in the official ONNX interface: `input` (B, T, 80) to `output` (B, 192).

One convolution and statistics pooling: far smaller than CAM++, but what it says still depends on the voice.
"""

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from common.constants import MEL_BINS, SPEAKER_DIM
from scripts.demo_model.onnx_graph import OnnxGraph

CHANNELS, KERNEL = 64, 5
KERNEL_SPREAD = 0.012  # log-mel features deviate by about 3, and their deviation is to stay in tanh's range


def write_campplus(path: Path, seed: int) -> None:
    """Write the ONNX file."""
    rng = np.random.default_rng(seed)
    g = OnnxGraph()
    kernel = g.weight("conv.weight", rng.normal(0, KERNEL_SPREAD, (CHANNELS, MEL_BINS, KERNEL)))
    pad = KERNEL // 2
    x = g.op("Transpose", "input", perm=[0, 2, 1])  # (B, T, 80) -> (B, 80, T)
    x = g.op("Tanh", g.op("Conv", x, kernel, pads=[pad, pad], kernel_shape=[KERNEL]))
    mean = g.op("ReduceMean", x, g.integers(-1), keepdims=1)
    deviation = g.op("Sub", x, mean)
    variance = g.op("ReduceMean", g.op("Mul", deviation, deviation), g.integers(-1), keepdims=0)
    spread = g.op("Sub", g.op("Sqrt", variance), g.constant(0.5))  # around zero, as the means are
    pooled = g.op("Concat", g.op("Squeeze", mean, g.integers(-1)), spread, axis=-1)  # (B, 2 * CHANNELS)
    project = g.weight("project.weight", rng.normal(0, 1, (2 * CHANNELS, SPEAKER_DIM)))
    g.op("MatMul", pooled, project, output="output")
    g.save(
        path,
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["B", "T", MEL_BINS])],
        helper.make_tensor_value_info("output", TensorProto.FLOAT, ["B", SPEAKER_DIM]),
    )
