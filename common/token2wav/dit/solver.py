"""The DiT's Euler solve for a batch of streams, in plain PyTorch operations; `graphs` has the form for GPUs.

It computes what the networks in `common.flow` define, faster: weights are fused (q, k and v; convolutions as one matrix
product), adaLN's modulation is computed once per Euler step when the model loads, and the part of the input that is the
same in every step is computed once per solve.

A batch of B streams has R = 2 B rows, the conditional ones first.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from common.constants import EULER_STEPS
from common.flow.cache import CONV_HISTORY
from common.flow.dit import NORM_EPS, DiTBlock, DiTEstimator, DiTFlow
from common.flow.matching import time_schedule


class BlockWeights(NamedTuple):
    """Weights of one block; matrices are (out, in)."""

    qkv: Tensor
    qkv_bias: Tensor
    qk_norm: Tensor  # (2, 2, D): scale and shift of the queries' norm, then of the keys'
    proj: Tensor
    proj_bias: Tensor
    conv1: Tensor  # (C, 3 C): taps side by side, oldest first
    conv1_bias: Tensor
    norm: Tensor
    norm_bias: Tensor
    conv2: Tensor
    conv2_bias: Tensor
    fc1: Tensor
    fc1_bias: Tensor
    fc2: Tensor
    fc2_bias: Tensor


class Modulation(NamedTuple):
    """adaLN's constants of one block at one Euler step, (C,) each; the scales include the added 1."""

    attn_shift: Tensor
    attn_scale: Tensor
    attn_gate: Tensor
    mlp_shift: Tensor
    mlp_scale: Tensor
    mlp_gate: Tensor
    conv_shift: Tensor
    conv_scale: Tensor
    conv_gate: Tensor


class Context(Protocol):
    """What the rows of a batch attend to in addition to their own chunk."""

    def attend(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v (R, H, T, D) of the chunk -> (R, T, H * D)"""
        ...

    def keep(self, step: int, keys: Tensor, values: Tensor) -> None:
        """Store what later chunks attend to: keys and values (depth, R, H, T, D) of the chunk at one step, after all
        its layers have attended."""
        ...


@dataclass(frozen=True)
class Scratch:
    """Tensors of one solve."""

    keys: Tensor  # (depth, R, H, T, D) of the present step; those of all ten would take 0.66 MB a frame
    values: Tensor
    history: Tensor  # (steps, depth, 2 convolutions, R, 2, C)
    next_history: Tensor


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=NORM_EPS) * scale + shift


def _causal_conv(
    x: Tensor, history: Tensor, next_history: Tensor, ends: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """x (R, T, C), history (R, 2, C) -> (R, T, C). Writes the frames at `ends` (R, 2) to `next_history`."""
    x = torch.cat([history, x], dim=1)
    taps = torch.cat([x[:, :-2], x[:, 1:-1], x[:, 2:]], dim=-1)  # (R, T, 3 C)
    torch.gather(x, 1, ends[:, :, None].expand(-1, -1, x.shape[2]), out=next_history)
    return F.linear(taps, weight, bias)


class DiTSolver:
    """Noise to mel for a batch of chunks."""

    def __init__(self, network: DiTFlow, steps: int = EULER_STEPS):
        estimator = network.decoder.estimator
        assert isinstance(estimator, DiTEstimator)
        config = estimator.config
        weight = estimator.in_proj.weight
        self.steps, self.depth, self.heads, self.head_dim = steps, config.depth, config.heads, config.head_dim
        self.mel_bins = config.out_channels
        self.device, self.dtype = weight.device, weight.dtype
        self._guidance = network.decoder.guidance
        blocks: list[Any] = list(estimator.blocks)
        self._blocks = [_block_weights(block) for block in blocks]
        self._input = weight[:, : self.mel_bins].contiguous()
        self._static = weight[:, self.mel_bins :].contiguous()
        self._static_bias = estimator.in_proj.bias
        self._output, self._output_bias = estimator.final_layer.linear.weight, estimator.final_layer.linear.bias
        times, self._widths = time_schedule(steps)
        embedded = estimator.t_embedder(torch.tensor(times, device=self.device), self.dtype)  # (steps, C)
        modulation = [block.adaLN_modulation(embedded).unflatten(-1, (9, -1)) for block in blocks]
        parts = torch.stack(modulation, dim=1)  # (steps, depth, 9, C): shift, scale, gate of each part
        final = estimator.final_layer.adaLN_modulation(embedded).unflatten(-1, (2, -1))  # (steps, 2, C)
        parts[:, :, 1::3] += 1
        final[:, 1] += 1
        self._modulation = [[Modulation(*of.unbind(0)) for of in step.unbind(0)] for step in parts.unbind(0)]
        self._final = final

    def conditions(self, mu: Tensor, speaker: Tensor, mel: Tensor | None = None) -> Tensor:
        """The part of the projected input that no step changes: mu (B, T, mel), speaker (B, mel) -> (R, T, C).

        mel (B, T, mel): the known mel, of a prompt only. The unconditional rows have no condition at all.
        """
        known = torch.zeros_like(mu) if mel is None else mel
        parts = torch.cat([mu, speaker[:, None].expand_as(mu), known], dim=-1)
        conditional = F.linear(parts, self._static, self._static_bias)
        return torch.cat([conditional, self._static_bias.expand_as(conditional)])

    def no_history(self, rows: int) -> Tensor:
        """The convolution history of streams that begin: zeros."""
        like = self._static
        return like.new_zeros(self.steps, self.depth, 2, rows, CONV_HISTORY, like.shape[0])

    def scratch(self, history: Tensor, frames: int) -> Scratch:
        """Buffers for a solve over `frames` frames of R rows, given their convolution history."""
        keys, values = history.new_empty(2, self.depth, history.shape[3], self.heads, frames, self.head_dim)
        return Scratch(keys, values, history, torch.empty_like(history))

    def solve(self, noise: Tensor, conditions: Tensor, frames: Tensor, context: Context, scratch: Scratch) -> Tensor:
        """noise (B, T, mel) float32, conditions (R, T, C), frames (B,) -> mel (B, T, mel) float32.

        frames: of each stream's own; the rest of a row is padding. Fills `scratch.next_history`.
        """
        x = noise
        for step, width in enumerate(self._widths):
            h = F.linear(x.to(self.dtype), self._input)
            h = (h + conditions.unflatten(0, (2, -1))).flatten(0, 1)  # (B, T, C) -> (2, B, T, C) -> (R, T, C)
            for layer in range(self.depth):
                h = self._block(h, step, layer, frames, context, scratch)
            context.keep(step, scratch.keys, scratch.values)
            conditional, unconditional = self._velocity(h, step).float().chunk(2)
            x = x + width * ((1 + self._guidance) * conditional - self._guidance * unconditional)
        return x

    def _block(self, h: Tensor, step: int, layer: int, frames: Tensor, context: Context, scratch: Scratch) -> Tensor:
        """(R, T, C) -> (R, T, C)"""
        R, T, _ = h.shape
        w, m, D = self._blocks[layer], self._modulation[step][layer], self.head_dim
        qkv = F.linear(_modulate(h, m.attn_shift, m.attn_scale), w.qkv, w.qkv_bias)
        q, k, v = qkv.view(R, T, 3, -1, D).permute(2, 0, 3, 1, 4)  # (R, T, 3, H, D) -> (3, R, H, T, D)
        (q_scale, q_shift), (k_scale, k_shift) = w.qk_norm
        keys, values = scratch.keys[layer], scratch.values[layer]
        keys.copy_(F.layer_norm(k, (D,), k_scale, k_shift))
        values.copy_(v)
        attended = context.attend(step, layer, F.layer_norm(q, (D,), q_scale, q_shift), keys, values)
        h = h + m.attn_gate * F.linear(attended, w.proj, w.proj_bias)

        ends = (frames.repeat(2)[:, None] + torch.arange(CONV_HISTORY, device=h.device)).long()  # in [history, chunk]
        history, following = scratch.history[step, layer], scratch.next_history[step, layer]
        y = _modulate(h, m.conv_shift, m.conv_scale)
        y = _causal_conv(y, history[0], following[0], ends, w.conv1, w.conv1_bias)
        y = F.mish(F.layer_norm(y, y.shape[-1:], w.norm, w.norm_bias))
        h = h + m.conv_gate * _causal_conv(y, history[1], following[1], ends, w.conv2, w.conv2_bias)

        y = F.gelu(F.linear(_modulate(h, m.mlp_shift, m.mlp_scale), w.fc1, w.fc1_bias), approximate="tanh")
        return h + m.mlp_gate * F.linear(y, w.fc2, w.fc2_bias)

    def _velocity(self, h: Tensor, step: int) -> Tensor:
        """(R, T, C) -> (R, T, mel)"""
        return F.linear(_modulate(h, self._final[step, 0], self._final[step, 1]), self._output, self._output_bias)


def _block_weights(block: DiTBlock) -> BlockWeights:
    attention, mlp = block.attn, block.mlp
    projections = (attention.to_q, attention.to_k, attention.to_v)
    conv: dict[str, Any] = dict(block.conv.block.items())
    return BlockWeights(
        qkv=torch.cat([p.weight for p in projections]),
        qkv_bias=torch.cat([p.bias for p in projections]),
        qk_norm=torch.stack([torch.stack([norm.weight, norm.bias]) for norm in (attention.q_norm, attention.k_norm)]),
        proj=attention.proj.weight,
        proj_bias=attention.proj.bias,
        conv1=_taps(conv["1"].weight),
        conv1_bias=conv["1"].bias,
        norm=conv["3"].weight,
        norm_bias=conv["3"].bias,
        conv2=_taps(conv["6"].weight),
        conv2_bias=conv["6"].bias,
        fc1=mlp.fc1.weight,
        fc1_bias=mlp.fc1.bias,
        fc2=mlp.fc2.weight,
        fc2_bias=mlp.fc2.bias,
    )


def _taps(kernel: Tensor) -> Tensor:
    """(C_out, C_in, 3) -> (C_out, 3 C_in), the oldest frame's tap first"""
    return kernel.permute(0, 2, 1).flatten(1).contiguous()
