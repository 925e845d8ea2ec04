"""The UNet estimator by fused kernels, for GPUs."""

from typing import Any

import torch
from torch import Tensor

from cosyvoice_triton import kernels
from cosyvoice_triton.networks.flow.layers import by_taps, weights
from cosyvoice_triton.networks.flow.unet import CausalBlock, UNetEstimator


class FusedUNet:
    """Computes the velocity of `UNetEstimator` for one Euler step. Conditional rows come first.

    Beside the network's own weights it has each convolution as a matrix over its taps, each attention's three
    projections as one, and what the resnet blocks add at each flow time.
    """

    def __init__(self, estimator: UNetEstimator, times: list[float]):
        self._config = estimator.config
        weight = estimator.final_proj.weight
        time = estimator.time_mlp(torch.tensor(times, device=weight.device), weight.dtype)  # (steps, 4 C)
        stages: list[Any] = [estimator.down_blocks[0], *estimator.mid_blocks, estimator.up_blocks[0]]
        self._stages = [_Stage(stage, time) for stage in stages]
        self._closing = [(by_taps(stage[2].weight), stage[2].bias) for stage in (stages[0], stages[-1])]
        self._final = _convolution(estimator.final_block)
        self._projection = weight.flatten(1), estimator.final_proj.bias

    def velocity(self, step: int, x: Tensor, frames: Tensor) -> Tensor:
        """Compute the velocity: x (R, T, 4 mel), noisy mel, encoder output, speaker and prompt mel; frames (B,) of each
        stream's own -> (R, T, mel)."""
        first, *middle, last = self._stages
        skip = x = self._run(first, step, x, frames)
        x = kernels.linear(x, *self._closing[0])
        for stage in middle:
            x = self._run(stage, step, x, frames)
        x = self._run(last, step, torch.cat([x, skip], dim=-1), frames)
        x = kernels.linear(x, *self._closing[1])
        weight, bias, norm = self._final
        return kernels.linear(kernels.linear(x, weight, bias), *self._projection, norm=norm, mish=True)

    def _run(self, stage: "_Stage", step: int, x: Tensor, frames: Tensor) -> Tensor:
        (weight1, bias1, norm1), (weight2, bias2, norm2) = stage.convolutions
        y = kernels.linear(x, weight1, bias1)
        y = kernels.linear(y, weight2, bias2, norm=norm1, mish=True, extra=stage.time[step])
        x = kernels.add_norm_mish(y, norm2, add_to=kernels.linear(x, *stage.residual))
        for block, qkv in zip(stage.blocks, stage.qkv, strict=True):
            x = self._transform(x, block, qkv, frames)
        return x

    def _transform(self, x: Tensor, block: Any, qkv: Tensor, frames: Tensor) -> Tensor:
        """Apply a transformer block to x (R, T, C), in place, and return it."""
        R, T, _ = x.shape
        config, out, widen, narrow = self._config, block.attn1.to_out[0], block.ff.net[0].proj, block.ff.net[2]
        q, k, v = x.new_empty(3, R, config.heads, T, config.head_dim).unbind(0)
        kernels.linear(x, qkv, norm=weights(block.norm1), heads=(q, k, v))
        attended = kernels.attend_blocks(q, k, v, frames, config.chunk_frames)
        kernels.linear(attended, *weights(out), add_to=x)
        y = kernels.linear(x, *weights(widen), norm=weights(block.norm3), activation="gelu")
        return kernels.linear(y, *weights(narrow), add_to=x)


class _Stage:
    """A `UNetStage`: its resnet block with weights as the kernels take them, and its transformer blocks."""

    def __init__(self, stage: Any, time: Tensor) -> None:
        resnet, self.blocks = stage[0], list(stage[1])
        self.convolutions = _convolution(resnet.block1), _convolution(resnet.block2)
        self.time = resnet.mlp(time)  # (steps, C)
        self.residual = resnet.res_conv.weight.flatten(1).contiguous(), resnet.res_conv.bias
        attentions = [block.attn1 for block in self.blocks]
        self.qkv = [torch.cat([of.to_q.weight, of.to_k.weight, of.to_v.weight]) for of in attentions]


def _convolution(block: CausalBlock) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return weight and bias of a block's convolution, and the norm that follows it."""
    parts: dict[str, Any] = dict(block.block.items())
    return by_taps(parts["0"].weight), parts["0"].bias, weights(parts["2"])
