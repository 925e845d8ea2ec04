"""The DiT's solve by fused kernels, for GPUs."""

from functools import partial

import torch
from torch import Tensor

from cosyvoice_triton import kernels
from cosyvoice_triton.networks.flow.dit import NORM_EPS
from cosyvoice_triton.token2wav.flow.cached_solver import Rows
from cosyvoice_triton.token2wav.flow.dit_solver import DiTSolver


class FusedDiTSolver(DiTSolver):
    """Seven kernels per block."""

    def _block(self, h: Tensor, step: int, layer: int, rows: Rows) -> Tensor:
        """(R, T, C) -> the same tensor"""
        w, m, scratch = self._blocks[layer], self._modulation[step][layer], rows.scratch
        linear = partial(kernels.linear, frames=rows.frames)
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

    def _velocity(self, h: Tensor, step: int) -> Tensor:
        ends = self._ends
        return kernels.linear(
            h, ends.output, ends.output_bias, norm=(ends.scale[step], ends.shift[step]), eps=NORM_EPS
        )  # fmt: skip
