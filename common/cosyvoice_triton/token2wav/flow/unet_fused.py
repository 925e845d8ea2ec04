"""The UNet estimator by fused kernels, for GPUs."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosyvoice_triton import kernels
from cosyvoice_triton.networks.flow.layers import by_taps
from cosyvoice_triton.networks.flow.unet import CausalBlock, ResnetBlock, TransformerBlock, UNetEstimator


class ConvWeights(NamedTuple):
    """A causal convolution as a matrix over its taps, and the norm that follows it."""

    weight: Tensor
    bias: Tensor
    norm: tuple[Tensor, Tensor]


class ResnetWeights(NamedTuple):
    first: ConvWeights
    second: ConvWeights
    time: Tensor  # (steps, C)
    residual: Tensor
    residual_bias: Tensor


class TransformerWeights(NamedTuple):
    norm1: tuple[Tensor, Tensor]
    qkv: Tensor
    out: Tensor
    out_bias: Tensor
    norm3: tuple[Tensor, Tensor]
    widen: Tensor
    widen_bias: Tensor
    narrow: Tensor
    narrow_bias: Tensor


class FusedUNet:
    """The estimator with fused weights: its velocity for one Euler step. Conditional rows come first."""

    def __init__(self, estimator: UNetEstimator, times: list[float]):
        self._config = estimator.config
        weight = estimator.final_proj.weight
        time = estimator.time_mlp(torch.tensor(times, device=weight.device), weight.dtype)  # (steps, 4 C)
        stages: list[Any] = [estimator.down_blocks[0], *estimator.mid_blocks, estimator.up_blocks[0]]
        self._resnets = [_resnet(stage[0], time) for stage in stages]
        self._transformers = [[_transformer(block) for block in stage[1]] for stage in stages]
        self._closing = [(by_taps(stage[2].weight), stage[2].bias) for stage in (stages[0], stages[-1])]
        self._final = _conv(estimator.final_block)
        self._projection = weight.flatten(1), estimator.final_proj.bias

    def velocity(self, step: int, x: Tensor, frames: Tensor) -> Tensor:
        """Compute the velocity: x (R, T, 4 mel), frames (B,) of each stream's own -> (R, T, mel)."""
        *before, last = range(len(self._resnets))
        skip = x = self._stage(before[0], step, x, frames)
        x = kernels.linear(x, *self._closing[0])
        for stage in before[1:]:
            x = self._stage(stage, step, x, frames)
        x = self._stage(last, step, torch.cat([x, skip], dim=-1), frames)
        x = kernels.linear(x, *self._closing[1])
        x = kernels.linear(x, self._final.weight, self._final.bias)
        return kernels.linear(x, *self._projection, norm=self._final.norm, mish=True)

    def _stage(self, stage: int, step: int, x: Tensor, frames: Tensor) -> Tensor:
        w = self._resnets[stage]
        y = kernels.linear(x, w.first.weight, w.first.bias)
        y = kernels.linear(y, w.second.weight, w.second.bias, norm=w.first.norm, mish=True, extra=w.time[step])
        x = kernels.linear(x, w.residual, w.residual_bias)
        x = kernels.add_norm_mish(y, w.second.norm, add_to=x)
        for block in self._transformers[stage]:
            x = self._transform(x, block, frames)
        return x

    def _transform(self, x: Tensor, w: TransformerWeights, frames: Tensor) -> Tensor:
        """Apply a transformer block to x (R, T, C), in place, and return it."""
        R, T, _ = x.shape
        config = self._config
        q, k, v = x.new_empty(3, R, config.heads, T, config.head_dim).unbind(0)
        kernels.linear(x, w.qkv, norm=w.norm1, heads=(q, k, v))
        attended = kernels.attend_blocks(q, k, v, frames, config.chunk_frames)
        kernels.linear(attended, w.out, w.out_bias, add_to=x)
        y = kernels.linear(x, w.widen, w.widen_bias, norm=w.norm3, activation="gelu")
        return kernels.linear(y, w.narrow, w.narrow_bias, add_to=x)


def _conv(block: CausalBlock) -> ConvWeights:
    parts: dict[str, Any] = dict(block.block.items())
    return ConvWeights(by_taps(parts["0"].weight), parts["0"].bias, (parts["2"].weight, parts["2"].bias))


def _resnet(block: ResnetBlock, time: Tensor) -> ResnetWeights:
    residual = block.res_conv
    assert residual.bias is not None
    return ResnetWeights(
        _conv(block.block1),
        _conv(block.block2),
        block.mlp(time),
        residual.weight.flatten(1).contiguous(),
        residual.bias,
    )


def _transformer(block: TransformerBlock) -> TransformerWeights:
    attention = block.attn1
    out: Any = attention.to_out[0]
    widen: Any = block.ff.net[0]
    narrow: Any = block.ff.net[2]
    return TransformerWeights(
        norm1=(block.norm1.weight, block.norm1.bias),
        qkv=torch.cat([attention.to_q.weight, attention.to_k.weight, attention.to_v.weight]),
        out=out.weight,
        out_bias=out.bias,
        norm3=(block.norm3.weight, block.norm3.bias),
        widen=widen.proj.weight,
        widen_bias=widen.proj.bias,
        narrow=narrow.weight,
        narrow_bias=narrow.bias,
    )
