"""S3 speech tokenizer v2 or v3: log mel of speech to 25 ids per second, read from the official ONNX file.

Two strided convolutions, transformer blocks with rotary positions and a convolutional memory over the values (FSMN),
and finite scalar quantisation: eight numbers of three levels are one id.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosyvoice_triton.checkpoint import load_strict, require_finite

HEAD_DIM = 64  # of the attention; cannot be derived from the weights' shapes
OFFICIAL_WIDTH, OFFICIAL_LAYERS = 1280, {"v2": 6, "v3": 12}
_MEMORY_KERNEL = 31
_LEVELS, _DIGITS = 3, 8
_BOUND = 0.9990000128746033  # in the official graph: keeps tanh away from the rounding of 1
_ROTARY_BASE = 10_000.0


class SpeechTokenizer(nn.Module):
    """The network, for batches that are padded at the end."""

    def __init__(self, mels: int, width: int, layers: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(mels, width, 3, stride=2, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList([_Block(width) for _ in range(layers)])
        self.project_in = nn.Linear(width, _DIGITS)

    def codes(self, mel: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the tokens' codes before rounding, (B, P, 8) in -0.999..0.999, P = ceil(T / 4).

        mel: (B, mels, T), zero beyond each row's `lengths` (B,); None: all T. A row's codes do not depend on others.
        """
        x = F.gelu(self.conv1(mel))
        if lengths is not None:
            x = x * _valid((lengths + 1) // 2, x.shape[2])[:, None]
        x = F.gelu(self.conv2(x)).transpose(1, 2)  # (B, C, P) -> (B, P, C)
        valid = None if lengths is None else _valid(token_counts(lengths), x.shape[1])
        rotary = _rotary(x)
        for block in self.blocks:
            x = block(x, rotary, valid)
        return self.project_in(x).float().tanh() * _BOUND

    @torch.inference_mode()
    def forward(self, mel: Tensor, lengths: Tensor) -> Tensor:
        """Return ids (B, P) int64, of which `token_counts(lengths)` are valid. Arguments as of `codes`."""
        padded = bool((lengths < mel.shape[2]).any())
        return token_ids(self.codes(mel, lengths if padded else None))


def token_counts(frames: Tensor) -> Tensor:
    """Return how many tokens so many mel frames have."""
    return (frames + 3) // 4


def token_ids(codes: Tensor) -> Tensor:
    """Return the ids (...) of codes (..., 8)."""
    digits = codes.round().long() + _LEVELS // 2  # 0, 1 or 2
    return (digits * _LEVELS ** torch.arange(_DIGITS, device=codes.device)).sum(-1)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = _Attention(width)
        self.attn_ln, self.mlp_ln = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], valid: Tensor | None) -> Tensor:
        x = x + self.attn(self.attn_ln(x), rotary, valid)
        return x + self.mlp(self.mlp_ln(x))


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(width, width) for _ in range(3))
        self.key = nn.Linear(width, width, bias=False)
        self.fsmn_block = nn.Conv1d(width, width, _MEMORY_KERNEL, padding=_MEMORY_KERNEL // 2, groups=width, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], valid: Tensor | None) -> Tensor:
        """x (B, P, C), rotary as of `_rotary`, valid (B, P) or None if all frames are -> (B, P, C)."""
        value = self.value(x) if valid is None else self.value(x) * valid[..., None]
        memory = value + self.fsmn_block(value.transpose(1, 2)).transpose(1, 2)
        query, key, heads = (  # (B, P, C) -> (B, H, P, D)
            y.unflatten(2, (-1, HEAD_DIM)).transpose(1, 2) for y in (self.query(x), self.key(x), value)
        )
        mask = None if valid is None else valid[:, None, None]
        mixed = F.scaled_dot_product_attention(_rotate(query, rotary), _rotate(key, rotary), heads, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2)) + memory


def _valid(lengths: Tensor, size: int) -> Tensor:
    """Return the mask (B, size) of rows with these lengths (B,)."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def _rotary(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine (P, HEAD_DIM) of the angles of the frames of x (B, P, C)."""
    steps = 1.0 / _ROTARY_BASE ** (torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    angles = torch.outer(torch.arange(x.shape[1], device=x.device), steps).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x (B, H, P, D) by its frames' angles; channel i is paired with i + D / 2."""
    low, high = x.chunk(2, dim=-1)
    return x * rotary[0] + torch.cat([-high, low], dim=-1) * rotary[1]


def load_speech_tokenizer(path: Path, device: str | torch.device = "cpu") -> SpeechTokenizer:
    """Load an official ONNX file, or one of the same form with other sizes.

    ValueError naming the file if it is damaged or another network, or has values that are not finite.
    """
    try:
        state = dict(_weights(path))
        width, mels, _ = state["conv1.weight"].shape
    except Exception as error:  # protobuf has its own for each kind of damage
        raise ValueError(f"{path} is not a speech tokenizer, or is damaged: {error}") from None
    require_finite(state, path)  # its tokens would be valid ids all the same
    layers = sum(key.endswith(".query.weight") for key in state)
    version = "v3" if path.name.startswith("speech_tokenizer_v3") else "v2"
    if width == OFFICIAL_WIDTH and layers != OFFICIAL_LAYERS[version]:
        raise ValueError(
            f"{path} has {layers} layers, but {version} of the tokenizer has {OFFICIAL_LAYERS[version]}: it is another "
            "version under this name, or was made with other sizes; fetch or make it again"
        )
    with torch.device("meta"):
        network = SpeechTokenizer(mels, width, layers)
    if version == "v3":  # its norms may lack a shift
        state = {key: torch.zeros(width) for key in network.state_dict() if key.endswith("_ln.bias")} | state
    try:
        return load_strict(network, state, device, torch.float32)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


# Nodes that use the weights of a block. The exporter names matrices by number, and their nodes by the module.
_BLOCK_NODE = re.compile(
    r"/(blocks\.\d+/(?:attn/(?:query|key|value|out)|mlp/mlp\.[02]|(?:attn|mlp)_ln))"
    r"/(?:(MatMul|Mul|LayerNormalization)|Add)(?:_\d+)?"
)


def _weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the network's weights under their keys. Norms are one node in the file of v2, in that of v3 a `Mul` and an
    `Add`; a weight may be a constant, and may be cast or copied before its use."""
    import onnx  # here: only this file's readers need it

    graph = onnx.load(path).graph
    known: dict[str, np.ndarray] = {weight.name: onnx.numpy_helper.to_array(weight) for weight in graph.initializer}
    convolutions = 0
    for node in graph.node:
        if node.op_type == "Constant":
            for value in node.attribute:
                known[node.output[0]] = onnx.numpy_helper.to_array(value.t) if value.t.dims else np.zeros(0)
        used = [known[name] for name in node.input if name in known and known[name].size > 1]
        if not used:
            continue
        if node.op_type in ("Cast", "Identity"):
            known[node.output[0]] = used[0]
        if node.op_type == "Conv":  # in the order of the graph: the first two, then a memory in each block
            key = f"conv{convolutions + 1}" if convolutions < 2 else f"blocks.{convolutions - 2}.attn.fsmn_block"
            convolutions += 1
            yield from _named(key, *used)
        elif node.op_type == "MatMul" and used[0].shape[-1] == _DIGITS:
            yield from _named("project_in", used[0].T, known["quantizer.project_in.bias"])
        elif found := _BLOCK_NODE.fullmatch(node.name):
            key = found[1].replace("mlp/mlp", "mlp").replace("/", ".")
            if found[2]:
                yield from _named(key, used[0].T, *used[1:])
            else:
                yield f"{key}.bias", _tensor(used[0])


def _named(key: str, *values: Any) -> Iterator[tuple[str, Tensor]]:
    for part, value in zip(("weight", "bias"), values, strict=False):
        yield f"{key}.{part}", _tensor(value)


def _tensor(value: np.ndarray) -> Tensor:
    """Return a copy, float32 and in the order in which networks read it."""
    return torch.from_numpy(np.array(value, np.float32, order="C"))
