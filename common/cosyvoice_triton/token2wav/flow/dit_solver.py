"""The DiT's solve in plain PyTorch operations; `fused` has the form for GPUs.

Weights are fused: q, k and v; convolutions as one matrix product.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cosyvoice_triton.constants import EULER_STEPS
from cosyvoice_triton.networks.flow.dit import NORM_EPS, DiTBlock, DiTEstimator, DiTFlow
from cosyvoice_triton.networks.flow.layers import by_taps
from cosyvoice_triton.networks.flow.matching import time_schedule
from cosyvoice_triton.token2wav.flow.cached_solver import CachedSolver, Ends, Rows, kept_inputs


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


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=NORM_EPS) * scale + shift


def _causal_conv(
    x: Tensor, history: Tensor, next_history: Tensor, kept: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """x (R, T, C), history (R, 2, C) -> (R, T, C). Writes the last two of the kept frames to `next_history`."""
    x = torch.cat([history, x], dim=1)
    taps = torch.cat([x[:, :-2], x[:, 1:-1], x[:, 2:]], dim=-1)  # (R, T, 3 C)
    kept_inputs(x, kept, 2, out=next_history)
    return F.linear(taps, weight, bias)


class DiTSolver(CachedSolver):
    """Step-Audio2's DiT."""

    def __init__(self, network: DiTFlow, steps: int = EULER_STEPS):
        estimator = network.decoder.estimator
        assert isinstance(estimator, DiTEstimator)
        blocks: list[Any] = list(estimator.blocks)
        self._blocks = [_block_weights(block) for block in blocks]
        projection, last = estimator.in_proj, estimator.final_layer
        times = torch.tensor(time_schedule(steps)[0], device=projection.weight.device)
        embedded = estimator.t_embedder(times, projection.weight.dtype)  # (steps, C)
        modulation = [block.adaLN_modulation(embedded).unflatten(-1, (9, -1)) for block in blocks]
        parts = torch.stack(modulation, dim=1)  # (steps, depth, 9, C): shift, scale, gate of each part
        parts[:, :, 1::3] += 1
        self._modulation = [[Modulation(*of.unbind(0)) for of in step.unbind(0)] for step in parts.unbind(0)]
        shift, scale = last.adaLN_modulation(embedded).chunk(2, dim=-1)
        ends = Ends(projection.weight, projection.bias, last.linear.weight, last.linear.bias, 1 + scale, shift)
        super().__init__(estimator.config, ends, network.decoder.guidance, steps)

    def _block(self, h: Tensor, step: int, layer: int, rows: Rows) -> Tensor:
        R, T, _ = h.shape
        w, m, D, scratch = self._blocks[layer], self._modulation[step][layer], self.head_dim, rows.scratch
        qkv = F.linear(_modulate(h, m.attn_shift, m.attn_scale), w.qkv, w.qkv_bias)
        q, k, v = qkv.view(R, T, 3, -1, D).permute(2, 0, 3, 1, 4)  # (R, T, 3, H, D) -> (3, R, H, T, D)
        (q_scale, q_shift), (k_scale, k_shift) = w.qk_norm
        keys, values = scratch.keys[layer], scratch.values[layer]
        keys.copy_(F.layer_norm(k, (D,), k_scale, k_shift))
        values.copy_(v)
        attended = rows.context.attend(step, layer, F.layer_norm(q, (D,), q_scale, q_shift), keys, values)
        h = h + m.attn_gate * F.linear(attended, w.proj, w.proj_bias)

        history, following = scratch.history[step, layer], scratch.next_history[step, layer]
        y = _modulate(h, m.conv_shift, m.conv_scale)
        y = _causal_conv(y, history[0], following[0], rows.kept, w.conv1, w.conv1_bias)
        y = F.mish(F.layer_norm(y, y.shape[-1:], w.norm, w.norm_bias))
        h = h + m.conv_gate * _causal_conv(y, history[1], following[1], rows.kept, w.conv2, w.conv2_bias)

        y = F.gelu(F.linear(_modulate(h, m.mlp_shift, m.mlp_scale), w.fc1, w.fc1_bias), approximate="tanh")
        return h + m.mlp_gate * F.linear(y, w.fc2, w.fc2_bias)

    def _velocity(self, h: Tensor, step: int) -> Tensor:
        ends = self._ends
        return F.linear(_modulate(h, ends.shift[step], ends.scale[step]), ends.output, ends.output_bias)


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
        conv1=by_taps(conv["1"].weight),
        conv1_bias=conv["1"].bias,
        norm=conv["3"].weight,
        norm_bias=conv["3"].bias,
        conv2=by_taps(conv["6"].weight),
        conv2_bias=conv["6"].bias,
        fc1=mlp.fc1.weight,
        fc1_bias=mlp.fc1.bias,
        fc2=mlp.fc2.weight,
        fc2_bias=mlp.fc2.bias,
    )
