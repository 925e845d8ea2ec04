"""The DiT's Euler solve for many streams at once, arranged for few launches.

Weights are fused (q, k and v; convolutions as one matrix product), adaLN's modulation is computed once per Euler step
at load, the part of the input that no step changes once per solve. The networks in `common.flow` say what is computed;
this says how fast.

Rows: a batch of B streams has R = 2 B rows, the conditional ones first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from common.constants import EULER_STEPS
from common.flow.dit import NORM_EPS, DiTBlock, DiTEstimator
from common.flow.dit_flow import DiTFlow
from common.flow.matching import time_schedule

HISTORY = 2  # frames that a causal convolution of kernel 3 needs from before its first


class BlockWeights(NamedTuple):
    """One block; matrices are (out, in)."""

    qkv: Tensor
    qkv_bias: Tensor
    q_norm: Tensor
    q_norm_bias: Tensor
    k_norm: Tensor
    k_norm_bias: Tensor
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


class Context(Protocol):
    """What the rows of a batch attend to beside their own chunk."""

    def attend(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v (R, H, T, D) of the chunk -> (R, T, H * D)"""
        ...


@dataclass(frozen=True)
class Scratch:
    """What a solve leaves behind for the streams' next chunks."""

    keys: Tensor  # (steps, depth, R, H, T, D)
    values: Tensor
    history: Tensor  # (steps, depth, 2 convolutions, R, 2, C): read, then replaced


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=NORM_EPS) * (1 + scale) + shift


def _causal_conv(x: Tensor, history: Tensor, ends: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (R, T, C) -> (R, T, C). `history` (R, 2, C) is replaced by the frames before each row's `ends` (R, 2)."""
    x = torch.cat([history, x], dim=1)
    taps = torch.cat([x[:, :-2], x[:, 1:-1], x[:, 2:]], dim=-1)  # (R, T, 3 C)
    history.copy_(x.gather(1, ends[:, :, None].expand(-1, -1, x.shape[2])))
    return F.linear(taps, weight, bias)


def before_attention(x: Tensor, modulation: Tensor, w: BlockWeights, keys: Tensor, values: Tensor) -> Tensor:
    """x (R, T, C), modulation (9, C) -> queries (R, H, T, D); `keys` and `values` (R, H, T, D) are written."""
    R, T, _ = x.shape
    D = keys.shape[-1]
    qkv = F.linear(_modulate(x, modulation[0], modulation[1]), w.qkv, w.qkv_bias)
    q, k, v = qkv.view(R, T, 3, -1, D).permute(2, 0, 3, 1, 4)  # (R, T, 3, H, D) -> (3, R, H, T, D)
    keys.copy_(F.layer_norm(k, (D,), w.k_norm, w.k_norm_bias))
    values.copy_(v)
    return F.layer_norm(q, (D,), w.q_norm, w.q_norm_bias)


def after_attention(
    x: Tensor, attended: Tensor, modulation: Tensor, w: BlockWeights, history: Tensor, ends: Tensor
) -> Tensor:
    """x and attended (R, T, C) -> x; the `history` (2, R, 2, C) of both convolutions is replaced."""
    _, _, gate_attn, shift_mlp, scale_mlp, gate_mlp, shift_conv, scale_conv, gate_conv = modulation.unbind(0)
    x = x + gate_attn * F.linear(attended, w.proj, w.proj_bias)
    y = _causal_conv(_modulate(x, shift_conv, scale_conv), history[0], ends, w.conv1, w.conv1_bias)
    y = F.mish(F.layer_norm(y, y.shape[-1:], w.norm, w.norm_bias))
    x = x + gate_conv * _causal_conv(y, history[1], ends, w.conv2, w.conv2_bias)
    y = F.gelu(F.linear(_modulate(x, shift_mlp, scale_mlp), w.fc1, w.fc1_bias), approximate="tanh")
    return x + gate_mlp * F.linear(y, w.fc2, w.fc2_bias)


class DiTSolver:
    """Noise to mel for a batch of chunks. `compiled`: blocks through torch.compile."""

    def __init__(self, network: DiTFlow, steps: int = EULER_STEPS, *, compiled: bool = False):
        estimator = network.decoder.estimator
        assert isinstance(estimator, DiTEstimator)
        config = estimator.config
        weight = estimator.in_proj.weight
        self.steps, self.depth, self.heads, self.head_dim = steps, config.depth, config.heads, config.head_dim
        self.width, self.mel_bins = config.width, config.out_channels
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
        self._modulation = torch.stack(modulation, dim=1)  # (steps, depth, 9, C)
        self._final = estimator.final_layer.adaLN_modulation(embedded).unflatten(-1, (2, -1))  # (steps, 2, C)
        self._before: Callable[..., Tensor] = before_attention
        self._after: Callable[..., Tensor] = after_attention
        if compiled:
            self._before = torch.compile(before_attention, dynamic=True)
            self._after = torch.compile(after_attention, dynamic=True)

    def conditions(self, mu: Tensor, speaker: Tensor) -> Tensor:
        """What every step adds to the projected state: mu (B, T, mel), speaker (B, mel) -> (R, T, C).

        A chunk behind the prompt has no mel to continue; the unconditional rows have nothing at all.
        """
        parts = torch.cat([mu, speaker[:, None].expand_as(mu), torch.zeros_like(mu)], dim=-1)
        conditional = F.linear(parts, self._static, self._static_bias)
        return torch.cat([conditional, self._static_bias.expand_as(conditional)])

    def solve(self, noise: Tensor, conditions: Tensor, frames: Tensor, context: Context, scratch: Scratch) -> Tensor:
        """noise (B, T, mel) float32, conditions (R, T, C), frames (B,) -> mel (B, T, mel) float32.

        `frames` are those of each stream's own; behind them a row holds padding. Fills `scratch`.
        """
        x = noise
        ends = (frames.repeat(2)[:, None] + torch.arange(HISTORY, device=frames.device)).long()  # in [history, chunk]
        for step, width in enumerate(self._widths):
            h = F.linear(torch.cat([x, x]).to(self.dtype), self._input) + conditions
            for layer, weights in enumerate(self._blocks):
                modulation = self._modulation[step, layer]
                keys, values = scratch.keys[step, layer], scratch.values[step, layer]
                q = self._before(h, modulation, weights, keys, values)
                attended = context.attend(step, layer, q, keys, values)
                h = self._after(h, attended, modulation, weights, scratch.history[step, layer], ends)
            h = _modulate(h, self._final[step, 0], self._final[step, 1])
            velocity = F.linear(h, self._output, self._output_bias).float()
            conditional, unconditional = velocity.chunk(2)
            x = x + width * ((1 + self._guidance) * conditional - self._guidance * unconditional)
        return x


def _block_weights(block: DiTBlock) -> BlockWeights:
    attention, mlp = block.attn, block.mlp
    projections = (attention.to_q, attention.to_k, attention.to_v)
    conv: dict[str, Any] = dict(block.conv.block.items())
    return BlockWeights(
        qkv=torch.cat([p.weight for p in projections]),
        qkv_bias=torch.cat([p.bias for p in projections]),
        q_norm=attention.q_norm.weight,
        q_norm_bias=attention.q_norm.bias,
        k_norm=attention.k_norm.weight,
        k_norm_bias=attention.k_norm.bias,
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
