"""CosyVoice3's estimator by fused kernels, for GPUs."""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from common import kernels
from common.flow.cosyvoice3 import NORM_EPS, RotaryDiTBlock, RotaryDiTEstimator, rotary_frequencies


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
    """adaLN's constants of one block, (steps, C) each; the scales include the added 1."""

    attn_shift: Tensor
    attn_scale: Tensor
    attn_gate: Tensor
    ff_shift: Tensor
    ff_scale: Tensor
    ff_gate: Tensor


class FusedRotaryDiT:
    """The estimator with fused weights: six kernels per block. adaLN's modulation is computed when the model loads."""

    def __init__(self, estimator: RotaryDiTEstimator, times: list[float]):
        self._config = config = estimator.config
        weight = estimator.input_embed.proj.weight
        time = estimator.time_embed(torch.tensor(times, device=weight.device), weight.dtype)  # (steps, C)
        blocks: list[Any] = list(estimator.transformer_blocks)
        self._blocks = [(_block(block), _modulation(block, time)) for block in blocks]
        # The network's inputs are noisy mel, prompt mel, encoder output, speaker; ours have the order of the UNet's.
        self._input = weight.unflatten(1, (4, -1))[:, [0, 2, 3, 1]].flatten(1)
        self._input_bias = estimator.input_embed.proj.bias
        self._positions = estimator.input_embed.conv_pos_embed
        scale, shift = estimator.norm_out.linear(F.silu(time)).chunk(2, dim=-1)
        self._final = 1 + scale, shift
        self._output, self._output_bias = estimator.proj_out.weight, estimator.proj_out.bias
        self._frequencies = rotary_frequencies(config.head_dim).to(weight.device)

    def velocity(self, step: int, x: Tensor, frames: Tensor) -> Tensor:
        """See `FusedEstimator.velocity`."""
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * self._frequencies  # (T, D / 2)
        rotary = torch.stack([angles.cos(), angles.sin()])
        x = kernels.linear(x, self._input, self._input_bias)
        x.add_(self._positions(x))
        for weights, modulation in self._blocks:
            self._transform(x, weights, RotaryModulation(*(part[step] for part in modulation)), frames, rotary)
        scale, shift = self._final
        return kernels.linear(x, self._output, self._output_bias, norm=(scale[step], shift[step]), eps=NORM_EPS)

    def _transform(self, x: Tensor, w: RotaryBlockWeights, m: RotaryModulation, frames: Tensor, rotary: Tensor) -> None:
        """x (R, T, C), in place."""
        R, T, _ = x.shape
        config = self._config
        q, k, v = x.new_empty(3, R, config.heads, T, config.head_dim).unbind(0)
        kernels.linear(x, w.qkv, w.qkv_bias, norm=(m.attn_scale, m.attn_shift), eps=NORM_EPS, heads=(q, k, v))
        kernels.rotate_first_head(q, k, rotary)
        attended = kernels.attend_blocks(q, k, v, frames, config.chunk_frames)
        kernels.linear(attended, w.out, w.out_bias, gate=m.attn_gate, add_to=x)
        norm = m.ff_scale, m.ff_shift
        y = kernels.linear(x, w.widen, w.widen_bias, norm=norm, eps=NORM_EPS, activation="gelu_tanh")
        kernels.linear(y, w.narrow, w.narrow_bias, gate=m.ff_gate, add_to=x)


def _block(block: RotaryDiTBlock) -> RotaryBlockWeights:
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


def _modulation(block: RotaryDiTBlock, time: Tensor) -> RotaryModulation:
    """time (steps, C)"""
    attn_shift, attn_scale, attn_gate, ff_shift, ff_scale, ff_gate = (part[:, 0] for part in block.attn_norm(time))
    return RotaryModulation(attn_shift, 1 + attn_scale, attn_gate, ff_shift, 1 + ff_scale, ff_gate)
