"""What serving asks of each network: the shapes and the precision that its TensorRT plan has to be built for.

Rows are those of a batch under classifier-free guidance, two per stream. A plan's memory grows with the largest of all
its sizes together, so that uses which differ much in their shapes have plans of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from common.accel.network import Limits
from common.accel.signatures import SPEAKER, Signature, signature_of
from common.config import OrchestratorConfig, Token2WavConfig
from common.constants import (
    CONTEXT_TOKENS,
    DIT_TAIL_FRAMES,
    LOOKAHEAD_TOKENS,
    MAX_REFERENCE_SECONDS,
    MAX_STREAM_TOKENS,
    MEL_RATE,
    MIN_REFERENCE_SECONDS,
    TOKEN_MEL_RATIO,
    TOKEN_RATE,
)
from common.stacks import Stack

Precision = Literal["float32", "float16", "bfloat16"]

MAX_BATCH = 16  # streams an execution: more at once gain little (docs/results/token2wav.md) and take memory
USUAL_BATCH = 4
USUAL_PROMPT_SECONDS, USUAL_SECONDS = 5, 8
FBANK_RATE = 100  # frames of CAM++'s features per second


@dataclass(frozen=True)
class Span:
    """The sizes that a dimension may have."""

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
    """One use of a network. `profile`: the sizes of its axes that vary, by their name in the signature. `options`:
    those of the command that builds plans, where they differ from its defaults.
    """

    use: str
    signature: Signature
    profile: Profile
    precision: Precision
    options: str = ""

    @property
    def onnx(self) -> str:
        """The network's file in the vocoder's model directory."""
        return self.signature.file

    def limits(self, shapes: Mapping[str, Sequence[int]]) -> Limits:
        """The shapes of all inputs, given those of the ONNX file, where -1 is a size that varies.

        ValueError where the file has other inputs, or cannot take what serving asks.
        """
        if unlike := sorted(shapes.keys() ^ self.signature.axes.keys()):
            raise ValueError(
                f"{self.onnx} has the inputs {', '.join(shapes)}, not {', '.join(self.signature.axes)}: {unlike[0]}"
            )
        spans = {name: self._spans(name, shape) for name, shape in shapes.items()}
        return Limits(
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
                raise ValueError(f"{self.onnx}: axis {axis} of input {name!r} varies, nothing says between what")
            if size >= 0 and span != Span(size, size, size):
                raise ValueError(
                    f"{self.onnx}: axis {axis} of input {name!r} is fixed at {size}, serving needs {varying} {span}; "
                    "remove it and export it as docs/accelerators.md describes"
                )
            spans.append(span)
        return spans


@dataclass(frozen=True)
class Serving:
    """The settings of a stack that bound the shapes, as its models are configured."""

    precision: Precision = "float16"
    max_streams: int = Token2WavConfig.max_streams
    max_hop_tokens: int = OrchestratorConfig.max_hop_tokens

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision must be one of {', '.join(get_args(Precision))}, not {self.precision!r}")
        for name in ("max_streams", "max_hop_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def options(self) -> str:
        """Those of the command that builds plans, where they differ from its defaults."""
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
                "cached": Span(0, usual_prompt + DIT_TAIL_FRAMES, prompt + DIT_TAIL_FRAMES),
            },
        }
        flows = [
            Workload(use, signature_of(stack, use), profiles[use], self.precision, self.options)
            for use in stack.networks
        ]
        return (*flows, speaker())


def speaker() -> Workload:
    """CAM++ over one recording's features. In float32 always: it runs once per voice."""
    frames = Span(
        int(MIN_REFERENCE_SECONDS * FBANK_RATE) - 2,  # a frame is longer than its hop: the last ones are not whole
        USUAL_PROMPT_SECONDS * FBANK_RATE,
        int(MAX_REFERENCE_SECONDS * FBANK_RATE),
    )
    profile = {"batch": Span(1, 1, 1), "frames": frames}
    return Workload("speaker", SPEAKER, profile, "float32")


def _rows(batch: int) -> Span:
    """Of up to `batch` streams: a conditional and an unconditional row each."""
    return Span(2, 2 * min(batch, USUAL_BATCH), 2 * batch)


def _span(usual: int, most: int) -> Span:
    """Mel frames from those of one token on."""
    return Span(TOKEN_MEL_RATIO, min(usual, most), most)
