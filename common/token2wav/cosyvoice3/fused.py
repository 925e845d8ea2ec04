"""The rotary DiT's solve by fused kernels, for GPUs."""

import torch
from torch import Tensor

from common import kernels
from common.flow.cosyvoice3 import NORM_EPS
from common.token2wav.cached.solver import Rows
from common.token2wav.cosyvoice3.solver import RotarySolver


class FusedRotarySolver(RotarySolver):
    """Six kernels per block. The convolutions before the first block are cuDNN's."""

    def _block(self, h: Tensor, step: int, layer: int, rows: Rows) -> Tensor:
        """(R, T, C) -> the same tensor"""
        w, m = self._blocks[layer], self._modulation[step][layer]
        keys, values = rows.scratch.keys[layer], rows.scratch.values[layer]
        q = torch.empty_like(keys)
        attn, ff = (m.attn_scale, m.attn_shift), (m.ff_scale, m.ff_shift)
        kernels.linear(h, w.qkv, w.qkv_bias, norm=attn, eps=NORM_EPS, heads=(q, keys, values))
        assert rows.rotary is not None
        kernels.rotate_first_head(q, keys, rows.rotary)
        attended = rows.context.attend(step, layer, q, keys, values)
        kernels.linear(attended, w.out, w.out_bias, gate=m.attn_gate, add_to=h)
        y = kernels.linear(h, w.widen, w.widen_bias, norm=ff, eps=NORM_EPS, activation="gelu_tanh")
        return kernels.linear(y, w.narrow, w.narrow_bias, gate=m.ff_gate, add_to=h)

    def _velocity(self, h: Tensor, step: int) -> Tensor:
        ends = self._ends
        return kernels.linear(
            h, ends.output, ends.output_bias, norm=(ends.scale[step], ends.shift[step]), eps=NORM_EPS
        )  # fmt: skip
