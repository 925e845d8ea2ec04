"""The shapes and the precision of each network in serving, for which its TensorRT plan has to be built.

A batch has two rows per stream if there is classifier-free guidance. A plan's memory grows with the product of its
largest sizes, so uses with very different shapes have separate plans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cosyvoice_triton.config import OrchestratorConfig, PlanPrecision
from cosyvoice_triton.constants import (
    CONTEXT_TOKENS,
    LOOKAHEAD_TOKENS,
    MAX_REFERENCE_SECONDS,
    MAX_STREAM_TOKENS,
    MEL_RATE,
    MIN_REFERENCE_SECONDS,
    STREAM_CACHE_FRAMES,
    TOKEN_MEL_RATIO,
    TOKEN_RATE,
)
from cosyvoice_triton.runtimes.network import ShapeLimits
from cosyvoice_triton.runtimes.signatures import SPEAKER, Signature, signature_of
from cosyvoice_triton.stacks import Stack

MAX_BATCH = 16  # streams per execution: more gain little (docs/results/speed.md) and take memory
USUAL_BATCH = 4
USUAL_PROMPT_SECONDS, USUAL_SECONDS = 5, 8
FBANK_RATE = 100  # frames of CAM++'s features per second
MAX_HOP_TOKENS = OrchestratorConfig.max_hop_tokens

Span = tuple[int, int, int]  # the smallest, usual and largest size of a dimension


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

    def limits(self, shapes: Mapping[str, Sequence[int]]) -> ShapeLimits:
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
        least, usual, most = ({name: self._shape(name, shape, of) for name, shape in shapes.items()} for of in range(3))
        return ShapeLimits(least, usual, most)

    def _shape(self, name: str, shape: Sequence[int], of: int) -> tuple[int, ...]:
        axes = self.signature.axes[name]
        return tuple(self.profile[axes[axis]][of] if axis in axes else size for axis, size in enumerate(shape))


def workloads(stack: Stack, precision: PlanPrecision, of_stream: int = 2) -> tuple[Workload, ...]:
    """Return every use of every network of a stack that TensorRT can run; `precision` is the flow's. of_stream: rows of
    each stream, see `FlowConfig.rows`."""
    one = (of_stream,) * 3
    rows = (of_stream, of_stream * USUAL_BATCH, of_stream * MAX_BATCH)
    prompt = int(MAX_REFERENCE_SECONDS * MEL_RATE)
    usual_prompt = USUAL_PROMPT_SECONDS * MEL_RATE
    usual_whole = usual_prompt + USUAL_SECONDS * MEL_RATE
    hop = TOKEN_MEL_RATIO * (MAX_HOP_TOKENS + LOOKAHEAD_TOKENS)
    window = prompt + TOKEN_MEL_RATIO * CONTEXT_TOKENS + hop
    least = TOKEN_MEL_RATIO  # mel frames, of one token
    profiles: dict[str, Mapping[str, Span]] = {
        "whole": {"rows": one, "frames": (least, usual_whole, prompt + TOKEN_MEL_RATIO * MAX_STREAM_TOKENS)},
        "streaming": {"rows": rows, "frames": (least, usual_whole, window)},
        "prompt": {"rows": one, "frames": (least, usual_prompt, prompt), "cached": (0, 0, 0)},
        "chunk": {
            "rows": rows,
            "frames": (least, TOKEN_MEL_RATIO * TOKEN_RATE, hop),
            "cached": (0, usual_prompt + STREAM_CACHE_FRAMES, prompt + STREAM_CACHE_FRAMES),
        },
    }
    flows = [Workload(use, signature_of(stack, use), profiles[use], precision) for use in stack.networks]
    return (*flows, speaker())


def speaker() -> Workload:
    """Return CAM++ over the features of one recording. Always float32: it runs once per voice."""
    frames = (
        int(MIN_REFERENCE_SECONDS * FBANK_RATE)
        - 2,  # windows are longer than their hop, so the last two are not complete
        USUAL_PROMPT_SECONDS * FBANK_RATE,
        int(MAX_REFERENCE_SECONDS * FBANK_RATE),
    )
    return Workload("speaker", SPEAKER, {"batch": (1, 1, 1), "frames": frames}, "float32")
