"""HiFT's activation in one pass over its input."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cosyvoice_triton.kernels.launch import cdiv, early, wait


@triton.jit(do_not_specialize=["T"])
def _snake(x_ptr, alpha_ptr, lengths_ptr, out_ptr, T, C, RAGGED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait(PDL)
    channel = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    places = channel.to(tl.int64) * T + at
    alpha = tl.load(alpha_ptr + channel % C).to(tl.float32)
    x = tl.load(x_ptr + places, mask=at < T, other=0.0).to(tl.float32)
    wave = tl.sin(alpha * x)
    y = x + wave * wave / (alpha + 1e-9)
    if RAGGED:
        y = tl.where(at < tl.load(lengths_ptr + channel // C), y, 0.0)
    tl.store(out_ptr + places, y.to(out_ptr.dtype.element_ty), mask=at < T)


def snake(x: Tensor, alpha: Tensor, lengths: Tensor | None) -> Tensor:
    """Compute x + sin(alpha x)^2 / alpha: x (B, C, T), alpha (C,) -> (B, C, T), zero after each row's length (B,)."""
    B, C, T = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _snake[(cdiv(T, 1024), B * C)](
        x.contiguous(), alpha, lengths, out, T, C, RAGGED=lengths is not None, BLOCK=1024, **early()
    )  # fmt: skip
    return out
