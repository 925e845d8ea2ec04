"""Kept keys and values in 8 bits: a row of D values of a head is D integers and their scale, so that whatever copies or
slices rows need not know."""

import torch
from torch import Tensor

SCALE_BYTES = 4  # a float32, which keeps rows aligned to words


def quantized(x: Tensor) -> Tensor:
    """Round rows (.., D) to (.., D + SCALE_BYTES) int8. A row that is not finite gets a scale that is not."""
    x = x.float()
    scale = (x.abs().amax(-1) / 127)[..., None]  # can be viewed as bytes also where there are no rows
    levels = (x / scale.clamp(min=torch.finfo(torch.float32).tiny)).add_(0.5).floor_()  # of a long voice, GiB
    return torch.cat([levels.to(torch.int8), scale.view(torch.int8)], dim=-1)


def dequantized(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of rows that `quantized` made: (.., D + SCALE_BYTES) int8 -> (.., D)."""
    levels, scale = rows.tensor_split([-SCALE_BYTES], dim=-1)
    return (levels * scale.contiguous().view(torch.float32)).to(dtype)
