"""A random-weight S3 tokenizer v2, written as the official ONNX file is: log-mel (1, 128, T) to ids (1, T/4).

The package s3tokenizer finds weights by the names of their nodes and two initializers; those names are kept, so that
the same file is read by s3tokenizer and runs in onnxruntime, with equal ids.
"""

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from scripts.demo_model.onnx_graph import OnnxGraph

N_MELS, WIDTH, HEADS, HEAD_DIM, LAYERS = 128, 128, 2, 64, 1
MLP = 4 * WIDTH
FSMN_KERNEL = 31
MAX_FRAMES = 2048  # of the rotary table: 80 s of tokens
TRITS = 8
CODE_SPREAD = 0.1  # deviation of the projection to the code: each trit takes all three values on speech
LAST_TRIT_SPREAD, LAST_TRIT_BIAS = 0.002, -0.5  # never the value 2: ids stay below 2/3 of the codebook (see llm.py)


class SpeechTokenizerWriter:
    """Draws the weights and adds the nodes; one instance writes one file."""

    def __init__(self, seed: int) -> None:
        self.graph = OnnxGraph()
        self.rng = np.random.default_rng(seed)

    def write(self, path: Path) -> None:
        g = self.graph
        x = self._encoder("feats")  # (1, t, WIDTH)
        spread = np.full(TRITS, CODE_SPREAD)
        spread[-1] = LAST_TRIT_SPREAD
        bias = np.zeros(TRITS)
        bias[-1] = LAST_TRIT_BIAS
        project = g.weight("onnx::MatMul_2536", self._normal(WIDTH, TRITS, std=1.0) * spread)
        code = g.op("MatMul", x, project, name="/quantizer/project_in/MatMul")
        code = g.op("Add", g.weight("quantizer.project_in.bias", bias), code, name="/quantizer/project_in/Add")
        bounded = g.op("Mul", g.op("Tanh", code), g.constant(0.999))
        trits = g.op("Add", g.op("Round", bounded), g.constant(1.0))  # 0, 1 or 2
        powers = g.constant((3.0 ** np.arange(TRITS)).astype(np.float32))
        ids = g.op("ReduceSum", g.op("Mul", trits, powers), g.integers(-1), keepdims=0)
        g.op("Cast", ids, output="indices", to=TensorProto.INT32)
        g.save(
            path,
            [
                helper.make_tensor_value_info("feats", TensorProto.FLOAT, [1, N_MELS, "T"]),
                helper.make_tensor_value_info("feats_length", TensorProto.INT32, [1]),
            ],
            helper.make_tensor_value_info("indices", TensorProto.INT32, [1, "t"]),
        )

    def _normal(self, *shape: int, std: float) -> np.ndarray:
        return self.rng.normal(0.0, std, shape)

    def _encoder(self, x: str) -> str:
        """(1, N_MELS, T) -> (1, t, WIDTH): two strided convolutions, then transformer blocks."""
        g = self.graph
        for i, channels in ((1, N_MELS), (2, WIDTH)):
            kernel = self._normal(WIDTH, channels, 3, std=(3 * channels) ** -0.5)
            # Filters without a mean: the level of the recording must not outweigh what changes in it.
            weight = g.weight(f"encoders.conv{i}.weight", kernel - kernel.mean(axis=(1, 2), keepdims=True))
            bias = g.weight(f"encoders.conv{i}.bias", np.zeros(WIDTH))
            x = g.op("Conv", x, weight, bias, name=f"/conv{i}/Conv", strides=[2], pads=[1, 1], kernel_shape=[3])
            x = g.op("Gelu", x)
        x = g.op("Transpose", x, perm=[0, 2, 1])  # (1, WIDTH, t) -> (1, t, WIDTH)
        rotary = self._rotary(x)
        for i in range(LAYERS):
            x = self._block(x, f"blocks.{i}", rotary)
        return x

    def _rotary(self, x: str) -> tuple[str, str]:
        """Cosine and sine (1, t, 1, HEAD_DIM) of the angles of each frame, cut to the length of x."""
        g = self.graph
        frequencies = 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = np.outer(np.arange(MAX_FRAMES), np.concatenate([frequencies, frequencies]))
        length = g.op("Gather", g.op("Shape", x), g.integers(1), axis=0)

        def cut(table: np.ndarray) -> str:
            rows = g.op("Slice", g.constant(table.astype(np.float32)), g.integers(0), length, g.integers(0))
            return g.op("Unsqueeze", rows, g.integers(0, 2))

        return cut(np.cos(angles)), cut(np.sin(angles))

    def _rotate(self, x: str, rotary: tuple[str, str]) -> str:
        """Rotary position embedding of x (1, t, HEADS, HEAD_DIM), halves paired."""
        g = self.graph
        cos, sin = rotary
        half = HEAD_DIM // 2
        low, high = (g.op("Slice", x, g.integers(i), g.integers(i + half), g.integers(3)) for i in (0, half))
        turned = g.op("Concat", g.op("Neg", high), low, axis=3)
        return g.op("Add", g.op("Mul", x, cos), g.op("Mul", turned, sin))

    def _linear(self, x: str, node: str, shape: tuple[int, int], *, bias: bool = True) -> str:
        g = self.graph
        weight = g.weight(f"{node}.weight", self._normal(*shape, std=shape[0] ** -0.5))
        y = g.op("MatMul", x, weight, name=f"{node}/MatMul")
        if not bias:
            return y
        return g.op("Add", g.weight(f"{node}.bias", self._normal(shape[1], std=0.02)), y, name=f"{node}/Add")

    def _norm(self, x: str, node: str) -> str:
        g = self.graph
        scale, shift = g.weight(f"{node}.weight", np.ones(WIDTH)), g.weight(f"{node}.bias", np.zeros(WIDTH))
        return g.op("LayerNormalization", x, scale, shift, name=f"{node}/LayerNormalization", epsilon=1e-5, axis=-1)

    def _block(self, x: str, block: str, rotary: tuple[str, str]) -> str:
        """Attention with a convolutional memory over the values (FSMN), then an MLP; both residual."""
        g = self.graph
        x = g.op("Add", x, self._attention(self._norm(x, f"/{block}/attn_ln"), f"/{block}/attn", rotary))
        y = self._linear(self._norm(x, f"/{block}/mlp_ln"), f"/{block}/mlp/mlp.0", (WIDTH, MLP))
        return g.op("Add", x, self._linear(g.op("Gelu", y), f"/{block}/mlp/mlp.2", (MLP, WIDTH)))

    def _attention(self, x: str, node: str, rotary: tuple[str, str]) -> str:
        g = self.graph
        square = (WIDTH, WIDTH)
        by_head = g.integers(0, 0, HEADS, HEAD_DIM)
        query = self._linear(x, f"{node}/query", square)
        key = self._linear(x, f"{node}/key", square, bias=False)
        value = self._linear(x, f"{node}/value", square)
        query, key = (self._rotate(g.op("Reshape", y, by_head), rotary) for y in (query, key))
        query = g.op("Transpose", query, perm=[0, 2, 1, 3])  # (1, t, H, D) -> (1, H, t, D)
        key = g.op("Transpose", key, perm=[0, 2, 3, 1])  # (1, t, H, D) -> (1, H, D, t)
        scale = g.constant(HEAD_DIM**-0.25)
        scores = g.op("MatMul", g.op("Mul", query, scale), g.op("Mul", key, scale))
        heads = g.op("Transpose", g.op("Reshape", value, by_head), perm=[0, 2, 1, 3])
        mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), heads)
        mixed = g.op("Transpose", mixed, perm=[0, 2, 1, 3])  # (1, H, t, D) -> (1, t, H, D)
        mixed = g.op("Reshape", mixed, g.integers(0, 0, WIDTH))
        return g.op("Add", self._linear(mixed, f"{node}/out", square), self._memory(value, node))

    def _memory(self, value: str, node: str) -> str:
        g = self.graph
        kernel = g.weight(f"{node}/fsmn", self._normal(WIDTH, 1, FSMN_KERNEL, std=FSMN_KERNEL**-0.5))
        pad = FSMN_KERNEL // 2
        memory = g.op(
            "Conv",
            g.op("Transpose", value, perm=[0, 2, 1]),  # (1, t, WIDTH) -> (1, WIDTH, t)
            kernel,
            name=f"{node}/fsmn_block/Conv",
            group=WIDTH,
            pads=[pad, pad],
            kernel_shape=[FSMN_KERNEL],
        )
        return g.op("Add", g.op("Transpose", memory, perm=[0, 2, 1]), value)
