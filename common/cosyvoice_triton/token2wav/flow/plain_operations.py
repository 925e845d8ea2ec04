"""The operations of `cached_solver.Operations` in plain PyTorch, for any device; `cosyvoice_triton.kernels` has them as
fused kernels for GPUs. Valid frames of rows (`frames`) are not looked at: what comes after them is computed, too."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cosyvoice_triton.networks.flow.cosyvoice3 import rotate
from cosyvoice_triton.token2wav.flow.cached_solver import History


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-5,
    mish: bool = False,
    history: History | None = None,
    activation: str = "",
    gate: Tensor | None = None,
    add_to: Tensor | None = None,
    heads: tuple[Tensor, Tensor, Tensor] | None = None,
    qk_norm: Tensor | None = None,
    frames: Tensor | None = None,
) -> Tensor:
    """See `kernels.linear`."""
    if norm is not None:
        scale, shift = norm
        x = F.layer_norm(x, x.shape[-1:], eps=eps) * scale + shift
    if mish:
        x = F.mish(x)
    if history is not None:
        T, x = x.shape[1], _after(history, x)
        x = torch.cat([x[:, tap : tap + T] for tap in range(x.shape[1] - T + 1)], dim=-1)  # (R, T, taps * C)
    y = F.linear(x, weight, bias)
    if activation == "gelu_tanh":
        y = F.gelu(y, approximate="tanh")
    if heads is not None:
        _, H, _, D = heads[0].shape
        for index, (part, out) in enumerate(zip(y.chunk(3, dim=-1), heads, strict=True)):
            part = part.unflatten(-1, (H, D))
            if qk_norm is not None and index < 2:
                part = F.layer_norm(part, (D,), *qk_norm[index])
            out.copy_(part.transpose(1, 2))  # (R, T, H, D) -> (R, H, T, D)
        return heads[0]
    if gate is not None:
        y = gate * y
    return y if add_to is None else add_to.add_(y)


def convolve_groups(
    x: Tensor, weight: Tensor, bias: Tensor, history: History, *, add_to: Tensor | None = None
) -> Tensor:
    """See `kernels.convolve_groups`."""
    kernel = weight.permute(0, 3, 2, 1).flatten(0, 1)  # (groups, taps, G in, G out) -> (C, G in, taps)
    y = F.conv1d(_after(history, x).transpose(1, 2), kernel, bias, groups=len(weight))
    y = F.mish(y).transpose(1, 2)  # (R, C, T) -> (R, T, C)
    return y if add_to is None else add_to.add_(y)


def rotate_first_head(q: Tensor, k: Tensor, rotary: Tensor) -> None:
    """See `kernels.rotate_first_head`."""
    rotary = rotary.repeat(1, len(q) // rotary.shape[1], 1, 1)
    for x in (q, k):
        x[:, 0] = rotate(x[:, 0], rotary)


def _after(history: History, x: Tensor) -> Tensor:
    """Put the frames before x (R, T, C) in front of it -> (R, reach + T, C). Writes the history that the next chunk
    needs: the last frames of those that each row keeps."""
    old, new, kept = history
    x = torch.cat([old, x], dim=1)
    at = (kept.repeat(len(x) // len(kept))[:, None] + torch.arange(old.shape[1], device=x.device)).long()
    torch.gather(x, 1, at[:, :, None].expand(-1, -1, x.shape[2]), out=new)
    return x
