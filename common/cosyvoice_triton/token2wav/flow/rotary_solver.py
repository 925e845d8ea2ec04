"""The rotary DiT's solve in plain PyTorch operations; `fused` has the form for GPUs."""

from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cosyvoice_triton.constants import EULER_STEPS
from cosyvoice_triton.networks.flow.cosyvoice3 import (
    NORM_EPS,
    CosyVoice3Flow,
    RotaryDiTBlock,
    RotaryDiTEstimator,
    rotary,
    rotary_frequencies,
    rotate,
)
from cosyvoice_triton.networks.flow.layers import split_heads
from cosyvoice_triton.networks.flow.matching import time_schedule
from cosyvoice_triton.token2wav.flow.cached_solver import CachedSolver, Context, Ends, Rows, kept_inputs


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


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=NORM_EPS) * scale + shift


class RotarySolver(CachedSolver):
    """CosyVoice3's rotary DiT."""

    def __init__(self, network: CosyVoice3Flow, steps: int = EULER_STEPS):
        estimator = network.decoder.estimator
        assert isinstance(estimator, RotaryDiTEstimator)
        blocks: list[Any] = list(estimator.transformer_blocks)
        self._blocks = [_block_weights(block) for block in blocks]
        embedding = estimator.input_embed
        weight = embedding.proj.weight
        time = estimator.time_embed(torch.tensor(time_schedule(steps)[0], device=weight.device), weight.dtype)
        modulation = [[part[:, 0] for part in block.attn_norm(time)] for block in blocks]  # of each 6 x (steps, C)
        self._modulation = [[_modulation(parts, step) for parts in modulation] for step in range(steps)]
        # The network's inputs are noisy mel, known mel, encoder output, speaker.
        ordered = weight.unflatten(1, (4, -1))[:, [0, 2, 3, 1]].flatten(1)
        scale, shift = estimator.norm_out.linear(F.silu(time)).chunk(2, dim=-1)
        last = estimator.proj_out
        ends = Ends(ordered, embedding.proj.bias, last.weight, last.bias, 1 + scale, shift)
        super().__init__(estimator.config, ends, network.decoder.guidance, steps)
        self._positions = embedding.conv_pos_embed
        self._frequencies = rotary_frequencies(estimator.config.head_dim).to(weight.device)

    def rows(self, starts: Tensor, frames: Tensor, kept: Tensor, T: int, context: Context, history: Tensor) -> Rows:
        rows = super().rows(starts, frames, kept, T, context, history)
        positions = starts[:, None] + torch.arange(T, device=starts.device)
        return replace(rows, rotary=rotary(positions, self._frequencies))

    def _begin(self, h: Tensor, step: int, rows: Rows) -> Tensor:
        history, following = (part[step, 0] for part in (rows.scratch.history, rows.scratch.next_history))
        y = h
        for conv, old, new in zip(self._positions.children(), history, following, strict=True):
            y = torch.cat([old, y], dim=1)
            kept_inputs(y, rows.kept, old.shape[1], out=new)
            y = cast(Tensor, conv(y.transpose(1, 2))).transpose(1, 2)  # (R, T, C) -> (R, C, T) -> (R, T, C)
        return h + y

    def _block(self, h: Tensor, step: int, layer: int, rows: Rows) -> Tensor:
        w, m = self._blocks[layer], self._modulation[step][layer]
        keys, values = rows.scratch.keys[layer], rows.scratch.values[layer]
        q, k, v = F.linear(_modulate(h, m.attn_shift, m.attn_scale), w.qkv, w.qkv_bias).chunk(3, dim=-1)
        assert rows.rotary is not None
        turns = rows.rotary.repeat(1, 2, 1, 1)  # of both halves of the guidance batch
        keys.copy_(split_heads(rotate(k, turns), self.heads))  # (R, T, C) -> (R, H, T, D)
        values.copy_(split_heads(v, self.heads))
        q = split_heads(rotate(q, turns), self.heads)
        h = h + m.attn_gate * F.linear(rows.context.attend(step, layer, q, keys, values), w.out, w.out_bias)
        y = F.gelu(F.linear(_modulate(h, m.ff_shift, m.ff_scale), w.widen, w.widen_bias), approximate="tanh")
        return h + m.ff_gate * F.linear(y, w.narrow, w.narrow_bias)

    def _velocity(self, h: Tensor, step: int) -> Tensor:
        ends = self._ends
        return F.linear(_modulate(h, ends.shift[step], ends.scale[step]), ends.output, ends.output_bias)


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
