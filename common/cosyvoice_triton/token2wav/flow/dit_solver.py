"""The solve of Step-Audio2's DiT: its weights, and seven operations per block."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosyvoice_triton.constants import EULER_STEPS
from cosyvoice_triton.networks.flow.dit import DiTBlock, DiTEstimator, DiTFlow
from cosyvoice_triton.networks.flow.layers import by_taps
from cosyvoice_triton.token2wav.flow.cached_solver import (
    NORM_EPS,
    CachedSolver,
    InputOutputProjections,
    Operations,
    Rows,
)


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


class DiTSolver(CachedSolver):
    """Solves by Step-Audio2's DiT."""

    def __init__(self, network: DiTFlow, operations: Operations, steps: int = EULER_STEPS):
        estimator = network.decoder.estimator
        assert isinstance(estimator, DiTEstimator)
        blocks: list[Any] = list(estimator.blocks)
        self._blocks = [_block_weights(block) for block in blocks]
        projection, last = estimator.in_proj, estimator.final_layer
        times = torch.tensor(network.decoder.schedule(steps)[0], device=projection.weight.device)
        embedded = estimator.t_embedder(times, projection.weight.dtype)  # (steps, C)
        modulation = [block.adaLN_modulation(embedded).unflatten(-1, (9, -1)) for block in blocks]
        parts = torch.stack(modulation, dim=1)  # (steps, depth, 9, C): shift, scale, gate of each part
        parts[:, :, 1::3] += 1
        self._modulation = [[Modulation(*of.unbind(0)) for of in step.unbind(0)] for step in parts.unbind(0)]
        shift, scale = last.adaLN_modulation(embedded).chunk(2, dim=-1)
        ends = InputOutputProjections(
            projection.weight, projection.bias, last.linear.weight, last.linear.bias, 1 + scale, shift
        )
        super().__init__(estimator.config, ends, operations, network.decoder, steps)

    def _block(self, h: Tensor, step: int, layer: int, rows: Rows) -> Tensor:
        w, m, scratch = self._blocks[layer], self._modulation[step][layer], rows.scratch
        linear = partial(self._operations.linear, frames=rows.frames)
        keys, values = scratch.keys[layer], scratch.values[layer]
        q = torch.empty_like(keys)
        attn, conv, mlp = (m.attn_scale, m.attn_shift), (m.conv_scale, m.conv_shift), (m.mlp_scale, m.mlp_shift)
        linear(h, w.qkv, w.qkv_bias, norm=attn, eps=NORM_EPS, heads=(q, keys, values), qk_norm=w.qk_norm)
        attended = rows.context.attend(step, layer, q, keys, values)
        linear(attended, w.proj, w.proj_bias, gate=m.attn_gate, add_to=h)

        history, following = scratch.history[step, layer], scratch.next_history[step, layer]
        first, second = ((history[i], following[i], rows.kept) for i in range(2))
        y = linear(h, w.conv1, w.conv1_bias, norm=conv, eps=NORM_EPS, history=first)
        norm = (w.norm, w.norm_bias)
        linear(y, w.conv2, w.conv2_bias, norm=norm, mish=True, history=second, gate=m.conv_gate, add_to=h)

        y = linear(h, w.fc1, w.fc1_bias, norm=mlp, eps=NORM_EPS, activation="gelu_tanh")
        return linear(y, w.fc2, w.fc2_bias, gate=m.mlp_gate, add_to=h)


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
