"""Layers that the encoder and both estimators share. Layouts: (B, C, T) for convolutions, (B, T, C) for attention."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TIME_SCALE = 1000


class Conv1d(nn.Conv1d):
    """A convolution without padding, computed as one matrix product.

    On a GPU, cuDNN takes tens of milliseconds per thread to plan each new shape, and batches of streams have many
    shapes. In an ONNX export it is an ordinary convolution.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Convolve (B, C, T) -> (B, C', T - kernel + 1)."""
        if torch.compiler.is_exporting():
            return super().forward(x)
        taps = x.unfold(2, self.kernel_size[0], 1).transpose(1, 2).flatten(2)  # (B, C, T', k) -> (B, T', C * k)
        return F.linear(taps, self.weight.flatten(1), self.bias).transpose(1, 2)  # (B, T', C') -> (B, C', T')


class CausalConv1d(Conv1d):
    """A convolution whose output frame depends on no later input frame."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int) -> None:
        super().__init__(in_channels, out_channels, kernel)
        self.reach = kernel - 1

    def forward(self, x: Tensor, history: Tensor | None = None) -> Tensor:
        """Convolve (B, C, T) -> (B, C', T). Before the first frame come zeros, or `history`: a stream's last inputs.

        `history` (B, C, reach), reach = kernel - 1, is replaced in place by the last inputs of this call.
        """
        if history is None:
            return super().forward(F.pad(x, (self.reach, 0)))
        x = torch.cat([history, x], dim=2)
        history.copy_(x[:, :, -self.reach :])
        return super().forward(x)


def by_taps(kernel: Tensor) -> Tensor:
    """Rearrange a convolution's weight for a product with inputs side by side: (C_out, C_in, taps) -> (C_out, taps *
    C_in), the oldest frame's tap first."""
    return kernel.transpose(1, 2).flatten(1).contiguous()


def weights(part: Any) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a linear layer, or scale and shift of a norm."""
    return part.weight, part.bias


def time_angles(t: Tensor, frequencies: int) -> Tensor:
    """Compute sines, then cosines, (B, frequencies) float32, of flow times 0..1 (B,) float32 as diffusion steps."""
    half = frequencies // 2
    frequency = torch.exp(torch.arange(half, device=t.device) * -(math.log(10_000) / (half - 1)))
    angle = TIME_SCALE * t[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(-3, -2)  # (..., T, H * D) -> (..., H, T, D)


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).flatten(-2)  # (..., H, T, D) -> (..., T, H * D)


def valid_frames(lengths: Tensor, frames: int) -> Tensor:
    """Return the mask of lengths (B,) -> (B, 1, frames) bool, true for frames that are not padding."""
    return (torch.arange(frames, device=lengths.device) < lengths[:, None])[:, None]


def attention_mask(valid: Tensor, chunk: int | None) -> Tensor:
    """Return which keys a query attends to: valid (B, 1 or T, T) bool -> (B, 1, 1 or T, T) bool.

    With a chunk size, a query attends to its own chunk and to everything before it.
    """
    if chunk is None:
        return valid[:, None]
    index = torch.arange(valid.shape[-1], device=valid.device) // chunk
    return valid[:, None] & (index <= index[:, None])
