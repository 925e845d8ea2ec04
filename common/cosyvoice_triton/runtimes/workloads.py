"""The shapes and the precision of each network in serving, for which its TensorRT plan has to be built.

A batch has two rows per stream, because of classifier-free guidance. A plan's memory grows with the product of its
largest sizes, so uses with very different shapes have separate plans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from cosyvoice_triton.config import OrchestratorConfig, Token2WavConfig
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

PlanPrecision = Literal["float32", "float16", "bfloat16"]

MAX_BATCH = 16  # streams per execution: more gain little (docs/results/speed.md) and take memory
USUAL_BATCH = 4
USUAL_PROMPT_SECONDS, USUAL_SECONDS = 5, 8
FBANK_RATE = 100  # frames of CAM++'s features per second


@dataclass(frozen=True)
class Span:
    """Smallest, usual and largest size of a dimension."""

    least: int
    usual: int
    most: int

    def covers(self, other: "Span") -> bool:
        return self.least <= other.least and other.most <= self.most

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


Profile = Mapping[str, Span]


@dataclass(frozen=True)
class Workload:
    """One use of a network.

    profile: sizes of the axes that vary, by their name in the signature. options: command-line options that build its
    plan, where they differ from the defaults.
    """

    use: str
    signature: Signature
    profile: Profile
    precision: PlanPrecision
    options: str = ""

    @property
    def onnx(self) -> str:
        """The network's file in the model directory."""
        return self.signature.file

    def limits(self, shapes: Mapping[str, Sequence[int]]) -> ShapeLimits:
        """Limits of all inputs, given their shapes in the ONNX file, where -1 is a size that varies.

        ValueError if the file has other inputs or fixes a size that varies in serving.
        """
        if unlike := sorted(shapes.keys() ^ self.signature.axes.keys()):
            raise ValueError(
                f"{self.onnx} has the inputs {', '.join(shapes)}, not {', '.join(self.signature.axes)}: {unlike[0]}"
            )
        spans = {name: self._spans(name, shape) for name, shape in shapes.items()}
        return ShapeLimits(
            least={name: tuple(span.least for span in each) for name, each in spans.items()},
            usual={name: tuple(span.usual for span in each) for name, each in spans.items()},
            most={name: tuple(span.most for span in each) for name, each in spans.items()},
        )

    def _spans(self, name: str, shape: Sequence[int]) -> list[Span]:
        spans = []
        for axis, size in enumerate(shape):
            varying = self.signature.axes[name].get(axis)
            span = Span(size, size, size) if varying is None else self.profile[varying]
            if span.least < 0:
                raise ValueError(f"{self.onnx}: axis {axis} of input {name!r} varies, and no limits are known for it")
            if size >= 0 and span != Span(size, size, size):
                raise ValueError(
                    f"{self.onnx}: axis {axis} of input {name!r} is fixed at {size}, serving needs {varying} {span}; "
                    "remove it and export it as docs/gpu.md describes"
                )
            spans.append(span)
        return spans


@dataclass(frozen=True)
class Serving:
    """The settings of a stack that bound the shapes of its networks."""

    precision: PlanPrecision = "float16"
    max_streams: int = Token2WavConfig.max_streams
    max_hop_tokens: int = OrchestratorConfig.max_hop_tokens

    def __post_init__(self) -> None:
        if self.precision not in get_args(PlanPrecision):
            raise ValueError(f"precision must be one of {', '.join(get_args(PlanPrecision))}, not {self.precision!r}")
        for name in ("max_streams", "max_hop_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def options(self) -> str:
        """Command-line options of the plan builder, where they differ from its defaults."""
        default = Serving()
        names = ("precision", "max_streams", "max_hop_tokens")
        return " ".join(
            f"--{name.replace('_', '-')} {getattr(self, name)}"
            for name in names
            if getattr(self, name) != getattr(default, name)
        )

    def workloads(self, stack: Stack) -> tuple[Workload, ...]:
        """Every use of every network of a stack that TensorRT can run."""
        rows = _rows(min(self.max_streams, MAX_BATCH))
        one = _rows(1)
        prompt = int(MAX_REFERENCE_SECONDS * MEL_RATE)
        usual_prompt = USUAL_PROMPT_SECONDS * MEL_RATE
        usual_whole = usual_prompt + USUAL_SECONDS * MEL_RATE
        hop = TOKEN_MEL_RATIO * (self.max_hop_tokens + LOOKAHEAD_TOKENS)
        window = prompt + TOKEN_MEL_RATIO * CONTEXT_TOKENS + hop
        profiles: dict[str, Profile] = {
            "whole": {"rows": one, "frames": _span(usual_whole, prompt + TOKEN_MEL_RATIO * MAX_STREAM_TOKENS)},
            "streaming": {"rows": rows, "frames": _span(usual_whole, window)},
            "prompt": {"rows": one, "frames": _span(usual_prompt, prompt), "cached": Span(0, 0, 0)},
            "chunk": {
                "rows": rows,
                "frames": _span(TOKEN_MEL_RATIO * TOKEN_RATE, hop),
                "cached": Span(0, usual_prompt + STREAM_CACHE_FRAMES, prompt + STREAM_CACHE_FRAMES),
            },
        }
        flows = [
            Workload(use, signature_of(stack, use), profiles[use], self.precision, self.options)
            for use in stack.networks
        ]
        return (*flows, speaker())


def speaker() -> Workload:
    """CAM++ over the features of one recording. Always float32: it runs once per voice."""
    frames = Span(
        int(MIN_REFERENCE_SECONDS * FBANK_RATE)
        - 2,  # windows are longer than their hop, so the last two are not complete
        USUAL_PROMPT_SECONDS * FBANK_RATE,
        int(MAX_REFERENCE_SECONDS * FBANK_RATE),
    )
    profile = {"batch": Span(1, 1, 1), "frames": frames}
    return Workload("speaker", SPEAKER, profile, "float32")


def _rows(batch: int) -> Span:
    """Rows of up to `batch` streams: a conditional and an unconditional one each."""
    return Span(2, 2 * min(batch, USUAL_BATCH), 2 * batch)


def _span(usual: int, most: int) -> Span:
    """A span of mel frames that starts at one token."""
    return Span(TOKEN_MEL_RATIO, min(usual, most), most)
