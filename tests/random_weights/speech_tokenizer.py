"""An S3 tokenizer v2 or v3 of any size, written like the official ONNX file: log mel (1, 128, T) to ids (1, T/4).

The package s3tokenizer finds weights by the names of the nodes that use them and by two initializers. These names are
kept, so that s3tokenizer reads the same file that onnxruntime runs, with equal ids. Matrices are stored as float16,
each cast by a node with the name of the node that uses it. In the file of v3 they are float32 and used directly, and
the scale and shift of a norm are nodes of their own.

Weights have the keys and shapes of `cosyvoice_triton.networks.speech_tokenizer`.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from onnx import TensorProto

from tests.random_weights.onnx_graph import OnnxGraph

N_MELS, HEAD_DIM = 128, 64
FSMN_KERNEL = 31
TRITS = 8

# Width and layers.
SMALL = (128, 1)
OFFICIAL, OFFICIAL_THIRD = (1280, 6), (1280, 12)
CODE_SPREAD = 0.1  # standard deviation of the projection to the code: trits take all three values on speech
LAST_TRIT_SPREAD, LAST_TRIT_BIAS = 0.002, -0.5  # never the value 2: ids stay below 2/3 of the codebook (see llm.py)

TokenizerWeights = Mapping[str, np.ndarray]


def random_weights(seed: int, width: int, layers: int) -> dict[str, np.ndarray]:
    """Return random weights with which every token depends on the sound around it."""
    rng = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}

    def matrix(key: str, rows: int, columns: int, *, bias: bool = True) -> None:
        weights[f"{key}.weight"] = rng.normal(0, columns**-0.5, (rows, columns))
        if bias:
            weights[f"{key}.bias"] = rng.normal(0, 0.02, rows)

    for i, channels in ((1, N_MELS), (2, width)):
        kernel = rng.normal(0, (3 * channels) ** -0.5, (width, channels, 3))
        # Zero-mean filters: otherwise the level of the recording would dominate its changes.
        weights[f"conv{i}.weight"] = kernel - kernel.mean(axis=(1, 2), keepdims=True)
        weights[f"conv{i}.bias"] = np.zeros(width)
    for i in range(layers):
        block = f"blocks.{i}"
        for norm in ("attn_ln", "mlp_ln"):
            weights[f"{block}.{norm}.weight"], weights[f"{block}.{norm}.bias"] = np.ones(width), np.zeros(width)
        for name in ("query", "key", "value", "out"):
            matrix(f"{block}.attn.{name}", width, width, bias=name != "key")
        weights[f"{block}.attn.fsmn_block.weight"] = rng.normal(0, FSMN_KERNEL**-0.5, (width, 1, FSMN_KERNEL))
        matrix(f"{block}.mlp.0", 4 * width, width)
        matrix(f"{block}.mlp.2", width, 4 * width)
    spread, bias = np.full((TRITS, 1), CODE_SPREAD), np.zeros(TRITS)
    spread[-1], bias[-1] = LAST_TRIT_SPREAD, LAST_TRIT_BIAS
    weights["project_in.weight"] = spread * rng.normal(0, 1, (TRITS, width))
    weights["project_in.bias"] = bias
    return weights


def write_speech_tokenizer(path: Path, weights: TokenizerWeights, about: str) -> None:
    """Write the ONNX file, as that of v3 if its name begins with speech_tokenizer_v3. about: its doc string."""
    writer = _ThirdTokenizerWriter if path.name.startswith("speech_tokenizer_v3") else _TokenizerWriter
    writer(weights).write(path, about)


class _TokenizerWriter:
    """Builds the graph; one instance writes one file. names_products: of linear layers, instead of their casts."""

    names_products = False

    def __init__(self, weights: TokenizerWeights) -> None:
        self.graph = OnnxGraph()
        self.weights = weights
        self.width = len(weights["conv1.bias"])
        self.layers = sum(key.endswith(".attn.query.weight") for key in weights)

    def write(self, path: Path, about: str) -> None:
        g = self.graph
        x = self._encoder("feats")  # (1, t, width)
        key = "project_in"
        project = self._half("onnx::MatMul_2536", self.weights[f"{key}.weight"].T)
        code = g.op("MatMul", x, project, name="/quantizer/project_in/MatMul")
        bias = g.weight("quantizer.project_in.bias", self.weights[f"{key}.bias"])
        code = g.op("Add", bias, code, name="/quantizer/project_in/Add")
        bounded = g.op("Mul", g.op("Tanh", code), g.constant(0.9990000128746033))
        trits = g.op("Add", g.op("Round", bounded), g.constant(1.0))  # 0, 1 or 2
        powers = g.constant((3.0 ** np.arange(TRITS)).astype(np.float32))
        ids = g.op("ReduceSum", g.op("Mul", trits, powers), g.integers(-1), keepdims=0)
        g.op("Cast", ids, output="indices", to=TensorProto.INT32)
        inputs = ("feats", TensorProto.FLOAT, [1, N_MELS, "T"]), ("feats_length", TensorProto.INT32, [1])
        g.save(path, inputs, [("indices", TensorProto.INT32, [1, "t"])], about)

    def _half(self, name: str, value: np.ndarray, *, node: str = "") -> str:
        """Add a float16 initializer as float32. node: name by which s3tokenizer finds the weight, if not its own."""
        return self.graph.op("Cast", self.graph.half_weight(name, value), name=node, to=TensorProto.FLOAT)

    def _encoder(self, x: str) -> str:
        """Add the encoder, (1, N_MELS, T) -> (1, t, width): two strided convolutions, then transformer blocks."""
        g = self.graph
        for i in (1, 2):
            weight = self._half(f"encoders.conv{i}.weight", self.weights[f"conv{i}.weight"])
            bias = g.weight(f"encoders.conv{i}.bias", self.weights[f"conv{i}.bias"])
            x = g.op("Conv", x, weight, bias, name=f"/conv{i}/Conv", strides=[2], pads=[1, 1], kernel_shape=[3])
            x = g.op("Gelu", x)
        x = g.op("Transpose", x, perm=[0, 2, 1])  # (1, width, t) -> (1, t, width)
        rotary = self._rotary(x)
        for i in range(self.layers):
            x = self._block(x, f"blocks.{i}", rotary)
        return x

    def _rotary(self, x: str) -> tuple[str, str]:
        """Return cosine and sine (t, 1, HEAD_DIM) of the angles of each frame of x."""
        g = self.graph
        frequencies = 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        step = g.constant(np.concatenate([frequencies, frequencies]).astype(np.float32))
        length = g.op("Gather", g.op("Shape", x), g.constant(np.array(1)), axis=0)
        zero, one = (g.constant(np.array(value)) for value in (0, 1))
        frame = g.op("Cast", g.op("Range", zero, length, one), to=TensorProto.FLOAT)
        angles = g.op("Mul", g.op("Unsqueeze", frame, g.integers(1, 2)), step)
        return g.op("Cos", angles), g.op("Sin", angles)

    def _rotate(self, x: str, rotary: tuple[str, str]) -> str:
        """Apply the rotary position embedding to x (1, t, heads, HEAD_DIM), halves paired."""
        g = self.graph
        cos, sin = rotary
        half = HEAD_DIM // 2
        low, high = (g.op("Slice", x, g.integers(i), g.integers(i + half), g.integers(3)) for i in (0, half))
        turned = g.op("Concat", g.op("Neg", high), low, axis=3)
        return g.op("Add", g.op("Mul", x, cos), g.op("Mul", turned, sin))

    def _linear(self, x: str, node: str) -> str:
        """Add the linear layer with the key `node`, with dots; official node names repeat "mlp"."""
        g = self.graph
        key = node[1:].replace("/mlp/mlp.", "/mlp.").replace("/", ".")
        matrix = self._half(f"{node}.weight", self.weights[f"{key}.weight"].T, node=f"{node}/MatMul")
        y = g.op("MatMul", x, matrix, name=f"{node}/MatMul" if self.names_products else "")
        bias = self.weights.get(f"{key}.bias")
        return y if bias is None else g.op("Add", g.weight(f"{node}.bias", bias), y, name=f"{node}/Add")

    def _norm(self, x: str, node: str) -> str:
        g, key = self.graph, node[1:].replace("/", ".")
        scale, shift = (g.weight(f"{node}.{part}", self.weights[f"{key}.{part}"]) for part in ("weight", "bias"))
        return g.op("LayerNormalization", x, scale, shift, name=f"{node}/LayerNormalization", epsilon=1e-5, axis=-1)

    def _block(self, x: str, block: str, rotary: tuple[str, str]) -> str:
        """Add attention with a convolutional memory over the values (FSMN), then an MLP; both are residual."""
        g = self.graph
        x = g.op("Add", x, self._attention(self._norm(x, f"/{block}/attn_ln"), f"/{block}/attn", rotary))
        y = self._linear(self._norm(x, f"/{block}/mlp_ln"), f"/{block}/mlp/mlp.0")
        return g.op("Add", x, self._linear(g.op("Gelu", y), f"/{block}/mlp/mlp.2"))

    def _attention(self, x: str, node: str, rotary: tuple[str, str]) -> str:
        g = self.graph
        by_head = g.integers(0, 0, self.width // HEAD_DIM, HEAD_DIM)
        query, key, value = (self._linear(x, f"{node}/{name}") for name in ("query", "key", "value"))
        query, key = (self._rotate(g.op("Reshape", y, by_head), rotary) for y in (query, key))
        query = g.op("Transpose", query, perm=[0, 2, 1, 3])  # (1, t, H, D) -> (1, H, t, D)
        key = g.op("Transpose", key, perm=[0, 2, 3, 1])  # (1, t, H, D) -> (1, H, D, t)
        scale = g.constant(HEAD_DIM**-0.25)
        scores = g.op("MatMul", g.op("Mul", query, scale), g.op("Mul", key, scale))
        heads = g.op("Transpose", g.op("Reshape", value, by_head), perm=[0, 2, 1, 3])
        mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), heads)
        mixed = g.op("Transpose", mixed, perm=[0, 2, 1, 3])  # (1, H, t, D) -> (1, t, H, D)
        mixed = g.op("Reshape", mixed, g.integers(0, 0, self.width))
        return g.op("Add", self._linear(mixed, f"{node}/out"), self._memory(value, node))

    def _memory(self, value: str, node: str) -> str:
        g = self.graph
        kernel = self.weights[f"{node[1:].replace('/', '.')}.fsmn_block.weight"]
        pad = FSMN_KERNEL // 2
        memory = g.op(
            "Conv",
            g.op("Transpose", value, perm=[0, 2, 1]),  # (1, t, width) -> (1, width, t)
            self._half(f"{node[1:].replace('/', '.')}.fsmn_block.weight", kernel, node=f"{node}/fsmn_block/Conv"),
            group=self.width,
            pads=[pad, pad],
            kernel_shape=[FSMN_KERNEL],
        )
        return g.op("Add", g.op("Transpose", memory, perm=[0, 2, 1]), value)


class _ThirdTokenizerWriter(_TokenizerWriter):
    names_products = True

    def _half(self, name: str, value: np.ndarray, *, node: str = "") -> str:
        """Add a float32 initializer."""
        return self.graph.weight(name, value)

    def _norm(self, x: str, node: str) -> str:
        g, key = self.graph, node[1:].replace("/", ".")
        plain = g.op("LayerNormalization", x, g.constant(np.ones(self.width, np.float32)), epsilon=1e-5, axis=-1)
        scale, shift = (g.weight(f"{node}.{part}", self.weights[f"{key}.{part}"]) for part in ("weight", "bias"))
        return g.op("Add", g.op("Mul", plain, scale, name=f"{node}/Mul"), shift, name=f"{node}/Add")
