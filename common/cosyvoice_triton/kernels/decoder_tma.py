"""A decoder's products in tiles that TMA, the tensor memory accelerator, fetches (compute capability 9.0 and above).

For few tokens, the weight's rows are the rows of the tensor cores' tile, which has 64 of them, and the tokens are its
columns. A program then keeps as much of the weight on its way as its shared memory holds, and does nothing else: x
comes in the type of the weight, with sums of its squares, so that the norm is a factor of the result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cosyvoice_triton.kernels.decoder import INTERLEAVE, store_rotated
from cosyvoice_triton.kernels.launch import cdiv, early, next_power_of_2, wait
from cosyvoice_triton.kernels.tiles import ProductTile


@triton.jit
def _products(
    x, weight, first_row, first_column,
    K: tl.constexpr, WEIGHT_FIRST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Multiply rows of x by rows of the weight -> (BM, BN)."""
    if WEIGHT_FIRST:
        sums = tl.zeros((BN, BM), tl.float32)
        for start in range(0, K, BK):
            sums = tl.dot(weight.load([first_column, start]), x.load([first_row, start]).T, sums)
        return sums.T
    else:
        sums = tl.zeros((BM, BN), tl.float32)
        for start in range(0, K, BK):
            sums = tl.dot(x.load([first_row, start]), weight.load([first_column, start]).T, sums)
        return sums


@triton.jit
def _scale(squares_ptr, m, T, eps, K: tl.constexpr, SUMS: tl.constexpr, WIDE: tl.constexpr):
    """Return the factor of RMS norm of rows m, given SUMS sums of squares for each."""
    part = tl.arange(0, WIDE)
    mask = (m < T)[:, None] & (part < SUMS)[None, :]
    squares = tl.load(squares_ptr + m[:, None] * SUMS + part[None, :], mask=mask, other=0.0)
    return 1 / tl.sqrt(tl.sum(squares, 1) / K + eps)


@triton.jit(do_not_specialize=["T"])
def _project_heads_tma(
    x, weight, squares_ptr, bias_ptr, q_ptr, keys_ptr, values_ptr, tables_ptr, slots_ptr, positions_ptr, rotary_ptr,
    T, eps, pages, context,
    K: tl.constexpr, SUMS: tl.constexpr, WIDE: tl.constexpr, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute a tile that is one head."""
    HALF: tl.constexpr = D // 2
    head = tl.program_id(1)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.arange(0, HALF)
    wait(PDL)
    inside = m < T
    mask = inside[:, None] & (column < HALF)[None, :]
    position = tl.load(positions_ptr + m, mask=inside, other=0)
    page = tl.load(tables_ptr + tl.load(slots_ptr + m, mask=inside, other=0) * pages + position // PAGE)
    angles = position[:, None] * HALF + column[None, :]
    cosine = tl.load(rotary_ptr + angles)
    sine = tl.load(rotary_ptr + context * HALF + angles)
    bias = tl.load(bias_ptr + head * D + column).to(tl.float32)
    other_bias = tl.load(bias_ptr + head * D + HALF + column).to(tl.float32)
    scale = _scale(squares_ptr, m, T, eps, K, SUMS, WIDE)
    whole = _products(x, weight, tl.program_id(0) * BM, head * D, K, True, BM, D, BK)
    one, other = tl.split(whole.reshape(BM, 2, HALF).permute(0, 2, 1))
    one = one * scale[:, None] + bias[None, :]
    other = other * scale[:, None] + other_bias[None, :]
    store_rotated(
        one, other, q_ptr, keys_ptr, values_ptr, m, head, column, position, page, cosine, sine, mask, H, KV, D, PAGE
    )  # fmt: skip


def project_heads_tma(
    x: Tensor, squares: Tensor, weight: Tensor, bias: Tensor, eps: float, keys: Tensor, values: Tensor, tables: Tensor,
    slots: Tensor, positions: Tensor, rotary: Tensor, tile: ProductTile,
) -> Tensor:  # fmt: skip
    """Compute `project_heads`, given x (T, K) in the type of the weight, and sums of its squares (T, n)."""
    (T, K), (_, KV, PAGE, D) = x.shape, keys.shape
    H = len(weight) // D - 2 * KV
    q = torch.empty(T, H, D, dtype=weight.dtype, device=x.device)
    _project_heads_tma[(cdiv(T, tile.rows), H + 2 * KV)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]), TensorDescriptor.from_tensor(weight, [D, tile.depth]),
        squares, bias, q, keys, values, tables, slots, positions, rotary, T, eps, tables.shape[1], rotary.shape[1],
        K=K, SUMS=squares.shape[1], WIDE=next_power_of_2(squares.shape[1]), H=H, KV=KV, D=D, PAGE=PAGE,
        BM=tile.rows, BK=tile.depth, num_warps=tile.warps, num_stages=tile.stages, **early(),
    )  # fmt: skip
    return q


@triton.jit(do_not_specialize=["T"])
def _gated_tma(
    x, weight, squares_ptr, out_ptr, T, eps,
    K: tl.constexpr, N: tl.constexpr, SUMS: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute a tile of BN interleaved gates and ups: one thread has both."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    wait(PDL)
    if SUMS:
        scale = _scale(squares_ptr, m, T, eps, K, SUMS, WIDE)
    both = _products(x, weight, tl.program_id(0) * BM, tl.program_id(1) * 2 * BN, K, SUMS > 0, BM, 2 * BN, BK)
    # (BM, 2 BN) -> (BM, BN / 8, 8, 2)
    gate, up = tl.split(both.reshape(BM, BN // INTERLEAVE, 2, INTERLEAVE).permute(0, 1, 3, 2))
    gate, up = gate.reshape(BM, BN), up.reshape(BM, BN)
    if SUMS:
        gate, up = gate * scale[:, None], up * scale[:, None]
    result = gate * tl.sigmoid(gate) * up
    mask = (m < T)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + m[:, None] * N + n[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)


def gated_tma(x: Tensor, squares: Tensor | None, weight: Tensor, eps: float, tile: ProductTile) -> Tensor:
    """Compute `gated`, given x (T, K) in the type of the weight: before the norm, with sums of its squares (T, n), if
    it has few tokens; else after the norm, without them."""
    (T, K), N = x.shape, len(weight) // 2
    out = torch.empty(T, N, dtype=weight.dtype, device=x.device)
    sums = 0 if squares is None else squares.shape[1]
    _gated_tma[(cdiv(T, tile.rows), cdiv(N, tile.columns))](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [2 * tile.columns, tile.depth]), squares, out, T, eps,
        K=K, N=N, SUMS=sums, WIDE=next_power_of_2(max(sums, 1)),
        BM=tile.rows, BN=tile.columns, BK=tile.depth, num_warps=tile.warps, num_stages=tile.stages, **early(),
    )  # fmt: skip
    return out
