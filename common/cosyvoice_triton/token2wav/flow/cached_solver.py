"""The Euler solve for a batch of streams, by an estimator that attends to kept keys and values.

It computes what the networks in `cosyvoice_triton.networks.flow` define, faster: adaLN's modulation is computed once
per Euler step when the model loads, and the part of the input that is the same in every step once per solve. Weights
are fused: queries, keys and values; a convolution as one matrix product. One definition serves all devices, over
`Operations`.

A batch of B streams has R rows: B, or with guidance 2 B, the conditional ones first.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cosyvoice_triton.networks.flow.base import FlowMatching
from cosyvoice_triton.networks.flow.config import DiTConfig, RotaryDiTConfig
from cosyvoice_triton.networks.flow.cosyvoice3 import rotate

NORM_EPS = 1e-6  # of the norms that adaLN modulates, in both estimators


class InputOutputProjections(NamedTuple):
    """Weights of an estimator's projections before its first block and after its last one.

    input (C, 4 mel) takes the noisy mel, the encoder's output, the speaker and the known mel. output (mel, C) comes
    after a norm whose scale (the added 1 included) and shift are (steps, C).
    """

    input: Tensor
    input_bias: Tensor
    output: Tensor
    output_bias: Tensor
    scale: Tensor
    shift: Tensor


class Modulation(NamedTuple):
    """adaLN's constants of one part of a block at one Euler step, (C,) each; the scale includes the added 1."""

    shift: Tensor
    scale: Tensor
    gate: Tensor

    @property
    def norm(self) -> tuple[Tensor, Tensor]:
        return self.scale, self.shift


# What a convolution reads before a row's own frames, (R, reach, C); where that of the next chunk goes; and how many of
# its own frames each row keeps, (B,).
History = tuple[Tensor, Tensor, Tensor]


class PlainOperations:
    """The operations of an estimator's blocks in plain PyTorch; `cosyvoice_triton.kernels`, which documents the
    arguments, has them fused, for GPUs. Valid frames of rows (`frames`) are not looked at: what comes after them is
    computed, too."""

    @staticmethod
    def linear(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        norm: tuple[Tensor, Tensor] | None = None,
        eps: float = 1e-5,
        mish: bool = False,
        history: History | None = None,
        activation: str = "",
        gate: Tensor | None = None,
        add_to: Tensor | None = None,
        heads: tuple[Tensor, Tensor, Tensor] | None = None,
        qk_norm: Tensor | None = None,
        frames: Tensor | None = None,
    ) -> Tensor:
        if norm is not None:
            scale, shift = norm
            x = F.layer_norm(x, x.shape[-1:], eps=eps) * scale + shift
        if mish:
            x = F.mish(x)
        if history is not None:
            x = _after(history, x).unfold(1, history[0].shape[1] + 1, 1).transpose(2, 3).flatten(2)  # (R, T, taps * C)
        y = F.linear(x, weight, bias)
        if activation == "gelu_tanh":
            y = F.gelu(y, approximate="tanh")
        if heads is not None:
            _, H, _, D = heads[0].shape
            for index, (part, out) in enumerate(zip(y.chunk(3, dim=-1), heads, strict=True)):
                part = part.unflatten(-1, (H, D))
                if qk_norm is not None and index < 2:
                    part = F.layer_norm(part, (D,), *qk_norm[index])
                out.copy_(part.transpose(1, 2))  # (R, T, H, D) -> (R, H, T, D)
            return heads[0]
        if gate is not None:
            y = gate * y
        return y if add_to is None else add_to.add_(y)

    @staticmethod
    def convolve_groups(
        x: Tensor, weight: Tensor, bias: Tensor, history: History, *, add_to: Tensor | None = None
    ) -> Tensor:
        kernel = weight.permute(0, 3, 2, 1).flatten(0, 1)  # (groups, taps, G in, G out) -> (C, G in, taps)
        y = F.conv1d(_after(history, x).transpose(1, 2), kernel, bias, groups=len(weight))
        y = F.mish(y).transpose(1, 2)  # (R, C, T) -> (R, T, C)
        return y if add_to is None else add_to.add_(y)

    @staticmethod
    def rotate_first_head(q: Tensor, k: Tensor, rotary: Tensor) -> None:
        rotary = rotary.repeat(1, len(q) // rotary.shape[1], 1, 1)
        for x in (q, k):
            x[:, 0] = rotate(x[:, 0], rotary)


# `kernels` is a module.
Operations = type[PlainOperations] | ModuleType


def _after(history: History, x: Tensor) -> Tensor:
    """Put the frames before x (R, T, C) in front of it -> (R, reach + T, C). Writes the history that the next chunk
    needs: the last frames of those that each row keeps."""
    old, new, kept = history
    x = torch.cat([old, x], dim=1)
    at = (kept.repeat(len(x) // len(kept))[:, None] + torch.arange(old.shape[1], device=x.device)).long()
    torch.gather(x, 1, at[:, :, None].expand(-1, -1, x.shape[2]), out=new)
    return x


class Context(Protocol):
    """What the rows of a batch attend to in addition to their own frames."""

    def attend(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: q, k, v (R, H, T, D) of the rows -> (R, T, H * D)."""
        ...

    def keep(self, step: int, keys: Tensor, values: Tensor) -> None:
        """Store what later chunks attend to, of keys and values (depth, R, H, T, D) at one step, after all its layers
        have attended."""
        ...


@dataclass(frozen=True)
class Scratch:
    """The working memory of one solve."""

    keys: Tensor  # (depth, R, H, T, D) of the present step only: those of all ten steps would take 0.66 MB a frame
    values: Tensor
    history: Tensor  # (steps, convolution pairs, 2 convolutions, R, reach, C)
    next_history: Tensor


@dataclass(frozen=True)
class Rows:
    """The rows of a solve, see `kv_cache.Row`: starts, frames and kept (B,), what they attend to and, if the estimator
    has rotary positions, the cosine and sine of each frame's angles, (2, B, T, D / 2) float32."""

    starts: Tensor
    frames: Tensor
    kept: Tensor
    context: Context
    scratch: Scratch
    rotary: Tensor | None = None


class CachedSolver(ABC):
    """Solves from noise to mel for a batch of chunks, by an estimator whose blocks a subclass defines."""

    def __init__(
        self,
        config: DiTConfig | RotaryDiTConfig,
        ends: InputOutputProjections,
        operations: Operations,
        decoder: FlowMatching[Any],
        steps: int,
    ):
        self.steps, self.depth, self.heads, self.head_dim = steps, config.depth, config.heads, config.head_dim
        self.mask_chunk = config.chunk_frames
        self.mel_bins = config.out_channels
        self.device, self.dtype = ends.input.device, ends.input.dtype
        self._histories = config.conv_pairs, config.conv_kernel - 1
        self._operations = operations
        self._decoder = decoder
        self._widths = decoder.schedule(steps)[1]
        self._ends = ends
        self._input = ends.input[:, : self.mel_bins].contiguous()
        self._static = ends.input[:, self.mel_bins :].contiguous()

    def conditions(self, mu: Tensor, speaker: Tensor, known: Tensor | None = None) -> Tensor:
        """Compute the part of the projected input that no step changes: mu (B, T, mel), speaker (B, mel) -> (R, T, C).

        known (B, T, mel): the mel of the prompt's frames, 0 for others. Unconditional rows have no condition at all.
        """
        known = torch.zeros_like(mu) if known is None else known
        parts = torch.cat([mu, speaker[:, None].expand_as(mu), known], dim=-1)
        conditional = F.linear(parts, self._static, self._ends.input_bias)
        if self._decoder.rows == 1:
            return conditional
        return torch.cat([conditional, self._ends.input_bias.expand_as(conditional)])

    def no_history(self, streams: int) -> Tensor:
        """Return the convolution history of the rows of streams that begin: zeros."""
        pairs, reach = self._histories
        return self._static.new_zeros(self.steps, pairs, 2, self._decoder.rows * streams, reach, len(self._static))

    def rows(self, starts: Tensor, frames: Tensor, kept: Tensor, T: int, context: Context, history: Tensor) -> Rows:
        """Make the rows, with buffers for up to T frames each, given the convolutions' history of all R rows."""
        keys, values = history.new_empty(2, self.depth, history.shape[3], self.heads, T, self.head_dim)
        scratch = Scratch(keys, values, history, torch.empty_like(history))
        return Rows(starts, frames, kept, context, scratch)

    def solve(self, noise: Tensor, conditions: Tensor, rows: Rows, tried: int | None = None) -> Tensor:
        """Solve: noise (B, T, mel) float32, conditions (R, T, C) -> mel (B, T, mel) float32. Fills `next_history`.

        tried: only so many first steps are done, and so many first blocks of each; of `next_history` their part.
        """
        x, scratch, ends = noise, rows.scratch, self._ends
        for step, width in enumerate(self._widths[:tried]):
            h = F.linear(x.to(self.dtype), self._input)
            h = (h + conditions.unflatten(0, (-1, len(h)))).flatten(0, 1)  # (B, T, C) -> (R / B, B, T, C) -> (R, T, C)
            h = self._begin(h, step, rows)
            for layer in range(self.depth)[:tried]:
                h = self._block(h, step, layer, rows)
            rows.context.keep(step, scratch.keys, scratch.values)
            norm = (ends.scale[step], ends.shift[step])
            velocity = self._operations.linear(h, ends.output, ends.output_bias, norm=norm, eps=NORM_EPS)
            x = x + width * self._decoder.guided(velocity.float())
        return x

    def _begin(self, h: Tensor, step: int, rows: Rows) -> Tensor:
        """Compute what comes before the first block: (R, T, C) -> the same tensor."""
        return h

    @abstractmethod
    def _block(self, h: Tensor, step: int, layer: int, rows: Rows) -> Tensor:
        """Compute a block in place: (R, T, C) -> the same tensor. Writes the layer's `scratch.keys` and
        `scratch.values`."""
