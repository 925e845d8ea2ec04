"""A causal convolution of groups of channels.

cuDNN computes one of 16 groups as 16 convolutions, one after another, and changes the layout before and after each.
"""

import triton
import triton.language as tl
from torch import Tensor

from cosyvoice_triton.kernels.launch import cdiv, early, wait
from cosyvoice_triton.kernels.linear import _mish, prepared
from cosyvoice_triton.kernels.tiles import tiles


@triton.jit(do_not_specialize=["M", "T"])
def _convolve(
    x_ptr, weight_ptr, bias_ptr, out_ptr, M, T,
    C: tl.constexpr, PAD: tl.constexpr, G: tl.constexpr, RESIDUAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    row, inside = m // T, m < M
    n = tl.program_id(1) * BN + tl.arange(0, BN)  # of all channels; the programs of a group are neighbours
    group, of_group = tl.program_id(1) * BN // G, n % G
    lane = tl.arange(0, BK)
    x_rows = x_ptr + (m + row * PAD)[:, None] * C + group * G
    weights = weight_ptr + group * (PAD + 1) * G * G
    acc = tl.zeros((BM, BN), tl.float32)
    wait(PDL)
    for start in range(0, (PAD + 1) * G, BK):
        tap, k = start // G, start % G + lane
        x = tl.load(x_rows + tap * C + k[None, :], mask=inside[:, None], other=0.0)
        w = tl.load(weights + (start + lane)[:, None] * G + of_group[None, :])
        acc += tl.dot(x, w, input_precision="ieee")
    y = _mish(acc + tl.load(bias_ptr + n).to(tl.float32)[None, :])
    places = out_ptr + m[:, None] * C + n[None, :]
    if RESIDUAL:
        y += tl.load(places, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(places, y.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def convolve_groups(
    x: Tensor, weight: Tensor, bias: Tensor, history: tuple[Tensor, Tensor, Tensor], *, add_to: Tensor | None = None
) -> Tensor:
    """Compute Mish of a causal convolution of x (R, T, C) -> (R, T, C), or add it to `add_to` in place.

    weight (groups, taps, G, G): for each tap, the oldest first, from a group's G channels (rows) to its own (columns);
    G is a power of two, at least 16. bias (C,). history: as for `linear`.
    """
    R, T, C = x.shape
    _, taps, G, _ = weight.shape
    out = x.new_empty(R, T, C) if add_to is None else add_to
    tile = tiles(x.dtype).grouped_convolution(R * T, G)
    _convolve[(cdiv(R * T, tile.rows), C // tile.columns)](
        prepared(x, taps - 1, history=history), weight, bias, out, R * T, T,
        C=C, PAD=taps - 1, G=G, RESIDUAL=add_to is not None, BM=tile.rows, BN=tile.columns, BK=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages, **early(),
    )  # fmt: skip
    return out
