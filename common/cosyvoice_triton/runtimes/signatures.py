"""The networks that other runtimes compute, with upstream's names of files, inputs and outputs, and the shapes and the
precision in which serving uses each: those of its TensorRT plan.

R = 2 B rows: the guidance batch. `t` is the flow time 0..1. Caches of the chunk-wise DiT are of one Euler step:
`cnn_cache` (depth, R, 2 C, 2), the last inputs of both convolutions concatenated, and `att_cache`
(depth, R, H, K, 2 D), keys and values concatenated. In `new_att_cache` upstream's own file puts the newest frames
first, ours puts them last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cosyvoice_triton import constants
from cosyvoice_triton.config import OrchestratorConfig, PlanPrecision
from cosyvoice_triton.networks.flow.dit import DiTEstimator
from cosyvoice_triton.networks.flow.unet import UNetEstimator
from cosyvoice_triton.runtimes.network import Limits, Shape
from cosyvoice_triton.stacks import Stack

Axes = Mapping[str, Mapping[int, str]]  # input name -> {axis that varies: name of its size}
MAX_BATCH = 16  # streams per execution: more gain little (docs/results/speed.md) and take memory
USUAL_BATCH = 4
USUAL_PROMPT_SECONDS, USUAL_SECONDS = 5, 8
FBANK_RATE = 100  # frames of CAM++'s features per second
MAX_HOP_TOKENS = OrchestratorConfig.max_hop_tokens

Span = tuple[int, int, int]  # the smallest, usual and largest size of a dimension


@dataclass(frozen=True)
class Signature:
    """A network's file in the checkpoint directory, its inputs with the axes that vary, and its outputs."""

    file: str
    axes: Axes
    outputs: tuple[str, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(self.axes)


_FRAMES = {0: "rows", 2: "frames"}
_CACHES = {"cnn_cache": {1: "rows"}, "att_cache": {1: "rows", 3: "cached"}}
WHOLE: Axes = {"x": _FRAMES, "mask": _FRAMES, "mu": _FRAMES, "t": {0: "rows"}, "spks": {0: "rows"}, "cond": _FRAMES}
CHUNK: Axes = {name: WHOLE[name] for name in ("x", "mu", "t", "spks", "cond")} | _CACHES

# Inputs and outputs by the use of a flow's estimator: a whole utterance; a stream's window under its masks; a prompt,
# and the next chunk after it, with caches.
_USES: dict[str, tuple[Axes, tuple[str, ...]]] = {
    "whole": (WHOLE, ("estimator_out",)),
    "streaming": (WHOLE, ("estimator_out",)),
    "prompt": (CHUNK, ("output", "new_cnn_cache", "new_att_cache")),
    "chunk": (CHUNK, ("output", "new_cnn_cache", "new_att_cache")),
}
SPEAKER = Signature(Stack.speaker_encoder, {"input": {0: "batch", 1: "frames"}}, ("output",))


def signature_of(stack: Stack, use: str) -> Signature:
    """Return the signature of the network that computes one use of the stack's flow."""
    return Signature(stack.networks[use], *_USES[use])


class WholeUtterance(nn.Module):
    """An estimator over padded rows, for export: `mask` (R, 1, T) is 1 on valid frames."""

    def __init__(self, estimator: UNetEstimator | DiTEstimator, streaming: bool = False) -> None:
        super().__init__()
        self.estimator = estimator
        self.streaming = streaming

    def forward(self, x: Tensor, mask: Tensor, mu: Tensor, t: Tensor, spks: Tensor, cond: Tensor) -> Tensor:
        """Compute the velocity (R, mel, T): x, mu, cond (R, mel, T), mask (R, 1, T), t (R,), spks (R, mel)."""
        if isinstance(self.estimator, UNetEstimator):
            return self.estimator(x, t, mu, spks, cond, mask > 0.5, self.streaming)
        return self.estimator(x, t, mu, spks, cond, mask > 0.5)


class NextChunk(nn.Module):
    """The DiT over the next T frames of streams with K frames of context, for export; no frame is padding.

    Caches grow by concatenation: writing in place, as into an `EstimatorCache`, would be exported as scatters with an
    index for every element.
    """

    def __init__(self, estimator: DiTEstimator) -> None:
        super().__init__()
        self.estimator = estimator

    def forward(
        self, x: Tensor, mu: Tensor, t: Tensor, spks: Tensor, cond: Tensor, cnn_cache: Tensor, att_cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the velocity (R, mel, T) of x, mu, cond (R, mel, T), and both caches, K + T frames long."""
        layers: Any = [_GrowingCache(*layer) for layer in zip(att_cache, split_convolutions(cnn_cache), strict=True)]
        velocity = self.estimator.forward_chunk(x, t, mu, spks, cond, layers)
        conv = torch.stack([torch.cat(layer.conv, dim=1) for layer in layers])  # twice (R, C, 2) -> (depth, R, 2 C, 2)
        return velocity, conv, torch.stack([layer.grown for layer in layers])


class _GrowingCache:
    """The parts of `EstimatorCache` and `KeyValues` that one layer of the DiT uses."""

    def __init__(self, known: Tensor, conv: Tensor) -> None:
        self.attention = self
        self._known = known  # (R, H, K, 2 D)
        self.conv = tuple(history.clone() for history in conv)  # the layer replaces each in place

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        self.grown = torch.cat([self._known, torch.cat([keys, values], dim=-1)], dim=-2)
        return self.grown.chunk(2, dim=-1)


def split_convolutions(cache: Tensor) -> Tensor:
    """Split the caches of convolutions: (depth, R, 2 C, 2) -> (depth, 2, R, C, 2)."""
    return cache.unflatten(2, (2, -1)).transpose(1, 2)


def join_convolutions(cache: Tensor) -> Tensor:
    """Reverse `split_convolutions`: (depth, 2, R, C, 2) -> (depth, R, 2 C, 2)."""
    return cache.transpose(1, 2).flatten(2, 3)


@dataclass(frozen=True)
class Workload:
    """One use of a network. profile: sizes of the axes that vary, by their name in the signature."""

    use: str
    signature: Signature
    profile: Mapping[str, Span]
    precision: PlanPrecision

    @property
    def onnx(self) -> str:
        """Return the network's file in the model directory."""
        return self.signature.file

    def limits(self, shapes: Mapping[str, Sequence[int]]) -> Limits:
        """Return the limits of all inputs, given their shapes in the ONNX file, where -1 is a size that varies.

        ValueError if the file has other inputs, or if other axes than those of the signature vary.
        """
        if shapes.keys() != self.signature.axes.keys():
            raise ValueError(f"{self.onnx} has the inputs {', '.join(shapes)}, not {', '.join(self.signature.axes)}")
        for name, shape in shapes.items():
            varying = {axis for axis, size in enumerate(shape) if size < 0}
            if varying != self.signature.axes[name].keys():
                raise ValueError(
                    f"{self.onnx}: input {name!r} is {tuple(shape)}, where serving varies the axes "
                    f"{sorted(self.signature.axes[name])}; remove it and export it as docs/gpu.md describes"
                )
        return {name: self._limits(name, shape) for name, shape in shapes.items()}

    def _limits(self, name: str, shape: Sequence[int]) -> tuple[Shape, Shape, Shape]:
        axes = self.signature.axes[name]
        spans = [self.profile[axes[axis]] if axis in axes else (size,) * 3 for axis, size in enumerate(shape)]
        least, usual, most = zip(*spans, strict=True)
        return least, usual, most


def workloads(stack: Stack, precision: PlanPrecision, of_stream: int = 2) -> tuple[Workload, ...]:
    """Return every use of every network of a stack that TensorRT can run; `precision` is the flow's. of_stream: rows of
    each stream, see `FlowConfig.rows`."""
    one = (of_stream,) * 3
    rows = (of_stream, of_stream * USUAL_BATCH, of_stream * MAX_BATCH)
    prompt = int(constants.MAX_REFERENCE_SECONDS * constants.MEL_RATE)
    usual_prompt = USUAL_PROMPT_SECONDS * constants.MEL_RATE
    usual_whole = usual_prompt + USUAL_SECONDS * constants.MEL_RATE
    hop = constants.TOKEN_MEL_RATIO * (MAX_HOP_TOKENS + constants.LOOKAHEAD_TOKENS)
    window = prompt + constants.TOKEN_MEL_RATIO * constants.CONTEXT_TOKENS + hop
    least = constants.TOKEN_MEL_RATIO  # mel frames, of one token
    profiles: dict[str, Mapping[str, Span]] = {
        "whole": {
            "rows": one,
            "frames": (least, usual_whole, prompt + constants.TOKEN_MEL_RATIO * constants.MAX_STREAM_TOKENS),
        },
        "streaming": {"rows": rows, "frames": (least, usual_whole, window)},
        "prompt": {"rows": one, "frames": (least, usual_prompt, prompt), "cached": (0, 0, 0)},
        "chunk": {
            "rows": rows,
            "frames": (least, constants.TOKEN_MEL_RATIO * constants.TOKEN_RATE, hop),
            "cached": (0, usual_prompt + constants.STREAM_CACHE_FRAMES, prompt + constants.STREAM_CACHE_FRAMES),
        },
    }
    flows = [Workload(use, signature_of(stack, use), profiles[use], precision) for use in stack.networks]
    return (*flows, speaker())


def speaker() -> Workload:
    """Return CAM++ over the features of one recording. Always float32: it runs once per voice."""
    frames = (
        int(constants.MIN_REFERENCE_SECONDS * FBANK_RATE)
        - 2,  # windows are longer than their hop, so the last two are not complete
        USUAL_PROMPT_SECONDS * FBANK_RATE,
        int(constants.MAX_REFERENCE_SECONDS * FBANK_RATE),
    )
    return Workload("speaker", SPEAKER, {"batch": (1, 1, 1), "frames": frames}, "float32")
