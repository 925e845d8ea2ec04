"""The solve of CosyVoice3's rotary DiT: its weights, six operations per block, and two convolutions before them."""

from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cosyvoice_triton.constants import EULER_STEPS
from cosyvoice_triton.networks.flow.cosyvoice3 import (
    CosyVoice3Flow,
    RotaryDiTBlock,
    RotaryDiTEstimator,
    rotary,
    rotary_frequencies,
)
from cosyvoice_triton.token2wav.flow import plain_operations
from cosyvoice_triton.token2wav.flow.cached_solver import (
    NORM_EPS,
    CachedSolver,
    Context,
    InputOutputProjections,
    Operations,
    Rows,
)

MIN_GROUP = 16  # channels of a group for which there is a kernel; small checkpoints have less


class RotaryBlockWeights(NamedTuple):
    """Weights of one block; matrices are (out, in)."""

    qkv: Tensor
    qkv_bias: Tensor
    out: Tensor
    out_bias: Tensor
    widen: Tensor
    widen_bias: Tensor
    narrow: Tensor
    narrow_bias: Tensor


class RotaryModulation(NamedTuple):
    """adaLN's constants of one block at one Euler step, (C,) each; the scales include the added 1."""

    attn_shift: Tensor
    attn_scale: Tensor
    attn_gate: Tensor
    ff_shift: Tensor
    ff_scale: Tensor
    ff_gate: Tensor


class RotarySolver(CachedSolver):
    """Solves by CosyVoice3's rotary DiT."""

    def __init__(self, network: CosyVoice3Flow, operations: Operations, steps: int = EULER_STEPS):
        estimator = network.decoder.estimator
        assert isinstance(estimator, RotaryDiTEstimator)
        blocks: list[Any] = list(estimator.transformer_blocks)
        self._blocks = [_block_weights(block) for block in blocks]
        embedding = estimator.input_embed
        weight = embedding.proj.weight
        time = estimator.time_embed(
            torch.tensor(network.decoder.schedule(steps)[0], device=weight.device), weight.dtype
        )
        modulation = [[part[:, 0] for part in block.attn_norm(time)] for block in blocks]  # of each 6 x (steps, C)
        self._modulation = [[_modulation(parts, step) for parts in modulation] for step in range(steps)]
        # The network's inputs are noisy mel, known mel, encoder output, speaker.
        ordered = weight.unflatten(1, (4, -1))[:, [0, 2, 3, 1]].flatten(1)
        scale, shift = estimator.norm_out.linear(F.silu(time)).chunk(2, dim=-1)
        last = estimator.proj_out
        ends = InputOutputProjections(ordered, embedding.proj.bias, last.weight, last.bias, 1 + scale, shift)
        super().__init__(estimator.config, ends, operations, network.decoder, steps)
        groups = estimator.config.conv_groups
        convolutions: list[Any] = [layer[0] for layer in cast(Any, embedding.conv_pos_embed.children())]
        self._convolutions = [(_by_group(conv.weight, groups), conv.bias) for conv in convolutions]
        wide = estimator.config.width // groups >= MIN_GROUP
        self._convolve = operations.convolve_groups if wide else plain_operations.convolve_groups
        self._frequencies = rotary_frequencies(estimator.config.head_dim).to(weight.device)

    def rows(self, starts: Tensor, frames: Tensor, kept: Tensor, T: int, context: Context, history: Tensor) -> Rows:
        rows = super().rows(starts, frames, kept, T, context, history)
        positions = starts[:, None] + torch.arange(T, device=starts.device)
        return replace(rows, rotary=rotary(positions, self._frequencies))

    def _begin(self, h: Tensor, step: int, rows: Rows) -> Tensor:
        old, new = rows.scratch.history[step, 0], rows.scratch.next_history[step, 0]
        first, second = ((old[i], new[i], rows.kept) for i in range(2))
        y = self._convolve(h, *self._convolutions[0], first)
        return self._convolve(y, *self._convolutions[1], second, add_to=h)

    def _block(self, h: Tensor, step: int, layer: int, rows: Rows) -> Tensor:
        w, m, linear = self._blocks[layer], self._modulation[step][layer], self._operations.linear
        keys, values = rows.scratch.keys[layer], rows.scratch.values[layer]
        q = torch.empty_like(keys)
        attn, ff = (m.attn_scale, m.attn_shift), (m.ff_scale, m.ff_shift)
        linear(h, w.qkv, w.qkv_bias, norm=attn, eps=NORM_EPS, heads=(q, keys, values), frames=rows.frames)
        assert rows.rotary is not None
        self._operations.rotate_first_head(q, keys, rows.rotary)
        attended = rows.context.attend(step, layer, q, keys, values)
        linear(attended, w.out, w.out_bias, gate=m.attn_gate, add_to=h, frames=rows.frames)
        y = linear(h, w.widen, w.widen_bias, norm=ff, eps=NORM_EPS, activation="gelu_tanh", frames=rows.frames)
        return linear(y, w.narrow, w.narrow_bias, gate=m.ff_gate, add_to=h, frames=rows.frames)


def _by_group(weight: Tensor, groups: int) -> Tensor:
    """Return the weight by group: (C, G, taps) -> (groups, taps, G in, G out)."""
    return weight.unflatten(0, (groups, -1)).permute(0, 3, 2, 1).contiguous()


def _block_weights(block: RotaryDiTBlock) -> RotaryBlockWeights:
    attention = block.attn
    out: Any = attention.to_out[0]
    (widen, _), _, narrow = cast(Any, block.ff.ff)
    projections = attention.to_q, attention.to_k, attention.to_v
    return RotaryBlockWeights(
        qkv=torch.cat([part.weight for part in projections]),
        qkv_bias=torch.cat([part.bias for part in projections]),
        out=out.weight,
        out_bias=out.bias,
        widen=widen.weight,
        widen_bias=widen.bias,
        narrow=narrow.weight,
        narrow_bias=narrow.bias,
    )


def _modulation(parts: list[Tensor], step: int) -> RotaryModulation:
    attn_shift, attn_scale, attn_gate, ff_shift, ff_scale, ff_gate = (part[step] for part in parts)
    return RotaryModulation(attn_shift, 1 + attn_scale, attn_gate, ff_shift, 1 + ff_scale, ff_gate)
