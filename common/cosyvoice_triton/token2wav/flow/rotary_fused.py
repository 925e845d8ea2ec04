"""The rotary DiT's solve by fused kernels, for GPUs."""

from typing import Any, cast

import torch
from torch import Tensor

from cosyvoice_triton import kernels
from cosyvoice_triton.constants import EULER_STEPS
from cosyvoice_triton.networks.flow.cosyvoice3 import NORM_EPS, CosyVoice3Flow
from cosyvoice_triton.token2wav.flow.cached_solver import Rows
from cosyvoice_triton.token2wav.flow.rotary_solver import RotarySolver


class FusedRotarySolver(RotarySolver):
    """Six kernels per block, and four for the convolutions before the first one."""

    def __init__(self, network: CosyVoice3Flow, steps: int = EULER_STEPS):
        super().__init__(network, steps)
        groups = network.config.estimator.conv_groups
        convolutions: list[Any] = [layer[0] for layer in cast(Any, self._positions.children())]
        self._convolutions = [(_by_group(conv.weight, groups), conv.bias) for conv in convolutions]

    def _begin(self, h: Tensor, step: int, rows: Rows) -> Tensor:
        """(R, T, C) -> the same tensor"""
        old, new = rows.scratch.history[step, 0], rows.scratch.next_history[step, 0]
        first, second = ((old[i], new[i], rows.kept) for i in range(2))
        y = kernels.convolve_groups(h, *self._convolutions[0], first)
        return kernels.convolve_groups(y, *self._convolutions[1], second, add_to=h)

    def _block(self, h: Tensor, step: int, layer: int, rows: Rows) -> Tensor:
        """(R, T, C) -> the same tensor"""
        w, m = self._blocks[layer], self._modulation[step][layer]
        keys, values = rows.scratch.keys[layer], rows.scratch.values[layer]
        q = torch.empty_like(keys)
        attn, ff = (m.attn_scale, m.attn_shift), (m.ff_scale, m.ff_shift)
        kernels.linear(h, w.qkv, w.qkv_bias, norm=attn, eps=NORM_EPS, heads=(q, keys, values), frames=rows.frames)
        assert rows.rotary is not None
        kernels.rotate_first_head(q, keys, rows.rotary)
        attended = rows.context.attend(step, layer, q, keys, values)
        kernels.linear(attended, w.out, w.out_bias, gate=m.attn_gate, add_to=h, frames=rows.frames)
        y = kernels.linear(h, w.widen, w.widen_bias, norm=ff, eps=NORM_EPS, activation="gelu_tanh", frames=rows.frames)
        return kernels.linear(y, w.narrow, w.narrow_bias, gate=m.ff_gate, add_to=h, frames=rows.frames)

    def _velocity(self, h: Tensor, step: int) -> Tensor:
        ends = self._ends
        return kernels.linear(
            h, ends.output, ends.output_bias, norm=(ends.scale[step], ends.shift[step]), eps=NORM_EPS
        )  # fmt: skip


def _by_group(weight: Tensor, groups: int) -> Tensor:
    """(C, G, taps) -> (groups, taps, G in, G out)"""
    return weight.unflatten(0, (groups, -1)).permute(0, 3, 2, 1).contiguous()
