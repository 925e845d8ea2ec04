"""A linear layer fused with the operations before and after it.

A network of small layers spends its time on kernel launches and on writing what the next kernel reads. Here the norm,
the activation and the shifted frames of a causal convolution are computed while the matrix product loads its input;
bias, activation, gate and residual are applied while it stores its result.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cosyvoice_triton.kernels.launch import cdiv, early, next_power_of_2, wait
from cosyvoice_triton.kernels.tiles import FEW_ROWS, is_few, tiles, uses_tma


@triton.jit
def _moments(x_ptr, rows, inside, C: tl.constexpr, BLOCK: tl.constexpr):
    """Compute mean and mean square of rows (BM,) of x (M, C), float32."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros(rows.shape, tl.float32)
    squares = tl.zeros(rows.shape, tl.float32)
    for start in range(0, C, BLOCK):
        mask = inside[:, None] & (start + lane < C)[None, :]
        x = tl.load(x_ptr + rows[:, None] * C + start + lane[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(x, 1)
        squares += tl.sum(x * x, 1)
    return total / C, squares / C


@triton.jit
def _mish(x):
    grown = tl.exp(tl.minimum(x, 20.0))
    grown = grown * (grown + 2)
    return x * grown / (grown + 2)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu_tanh":
        x *= tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    if ACTIVATION == "gelu":
        x *= 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    if ACTIVATION == "silu":
        x *= tl.sigmoid(x)
    if ACTIVATION == "leaky_relu":
        x = tl.where(x < 0, 0.01 * x, x)
    return x


@triton.jit
def _head_normed(x, part, norm_ptr, QK_NORM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Normalise x (BM, BN) of whole heads; part 0 is queries, 1 keys, 2 values, which are not normalised."""
    if QK_NORM:
        if part < 2:
            d = tl.arange(0, D)
            norm = norm_ptr + part * 2 * D
            y = tl.reshape(x, (BM, BN // D, D))
            y -= (tl.sum(y, 2) / D)[:, :, None]
            y *= (1 / tl.sqrt(tl.sum(y * y, 2) / D + 1e-5))[:, :, None]
            y *= tl.load(norm + d).to(tl.float32)[None, None, :]
            x = tl.reshape(y + tl.load(norm + D + d).to(tl.float32)[None, None, :], (BM, BN))
    return x


@triton.jit
def _normed(x, mean, rstd, scale_ptr, shift_ptr, extra_ptr, k, wide, MISH: tl.constexpr, EXTRA: tl.constexpr):
    """Apply the norm's scale and shift to x (M, K) float32, then optionally Mish, and optionally add a vector (K,)."""
    scale = tl.load(scale_ptr + k, mask=wide, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + k, mask=wide, other=0.0).to(tl.float32)
    y = (x - mean[:, None]) * rstd[:, None] * scale[None, :] + shift[None, :]
    if MISH:
        y = _mish(y)
    if EXTRA:
        y += tl.load(extra_ptr + k, mask=wide, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def _all_padding(row, t, inside, frames_ptr, B):
    """Return whether none of these frames t of rows is among the valid ones of its stream, (B,)."""
    frames = tl.load(frames_ptr + row % B, mask=inside, other=0).to(tl.int32)
    return tl.max((t < frames).to(tl.int32), 0) == 0


@triton.jit(do_not_specialize=["T", "B", "rows"])
def _prepare(
    x_ptr, scale_ptr, shift_ptr, extra_ptr, history_ptr, new_history_ptr, kept_ptr, frames_ptr, out_ptr,
    rows, T, B, eps,
    C: tl.constexpr, PAD: tl.constexpr, NORM: tl.constexpr, MISH: tl.constexpr, EXTRA: tl.constexpr,
    HISTORY: tl.constexpr, BM: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    at = tl.program_id(0) * BM + tl.arange(0, BM)  # in (R, PAD + T)
    row, j = at // (T + PAD), at % (T + PAD)
    if frames_ptr is not None:
        if _all_padding(row, j - PAD, at < rows, frames_ptr, B):
            return
    k = tl.arange(0, WIDE)
    wide = k < C
    own = (at < rows) & (j >= PAD)
    mask = own[:, None] & wide[None, :]
    x = tl.load(x_ptr + (row * T + j - PAD)[:, None] * C + k[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        mean = tl.sum(x, 1) / C
        away = tl.where(mask, x - mean[:, None], 0.0)
        rstd = 1 / tl.sqrt(tl.sum(away * away, 1) / C + eps)
        x = tl.where(mask, _normed(x, mean, rstd, scale_ptr, shift_ptr, extra_ptr, k, wide, MISH, EXTRA), 0.0)
    y = x.to(out_ptr.dtype.element_ty)
    if HISTORY:
        old = ((at < rows) & (j < PAD))[:, None] & wide[None, :]
        y = tl.where(old, tl.load(history_ptr + (row * PAD + j)[:, None] * C + k[None, :], mask=old, other=0.0), y)
        place = j - tl.load(kept_ptr + row % B, mask=at < rows, other=0).to(tl.int32)
        kept = ((at < rows) & (place >= 0) & (place < PAD))[:, None] & wide[None, :]
        tl.store(new_history_ptr + (row * PAD + place)[:, None] * C + k[None, :], y, mask=kept)
    tl.store(out_ptr + at[:, None] * C + k[None, :], y, mask=(at < rows)[:, None] & wide[None, :])


@triton.jit
def _products(
    x_ptr, weight_ptr, scale_ptr, shift_ptr, extra_ptr, m, row, inside, n, N, eps,
    C: tl.constexpr, PAD: tl.constexpr, NORM: tl.constexpr, MISH: tl.constexpr, EXTRA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Multiply rows of the padded x (R, PAD + T, C), after its norm, by rows of the weight -> (BM, BN)."""
    K: tl.constexpr = (PAD + 1) * C  # the frames of a convolution are adjacent in memory
    lane = tl.arange(0, BK)
    if NORM:
        mean, square = _moments(x_ptr, m, inside, C, BK)
        rstd = 1 / tl.sqrt(tl.maximum(square - mean * mean, 0.0) + eps)
    x_rows = x_ptr + (m + row * PAD)[:, None] * C
    weights = weight_ptr + n[:, None] * K
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + lane
        x = tl.load(x_rows + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0)
        if NORM:
            y = _normed(x.to(tl.float32), mean, rstd, scale_ptr, shift_ptr, extra_ptr, k, k < K, MISH, EXTRA)
            x = y.to(x.dtype)
        w = tl.load(weights + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _tma_products(
    x, weight, C: tl.constexpr, PAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Compute `_products` without a norm, in tiles that TMA fetches, given the descriptors of both tensors."""
    first_row, first_column = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, (PAD + 1) * C, BK):
        w = weight.load([first_column, start])
        acc = tl.dot(x.load([first_row + start // C, start % C]), w.T, acc)
    return acc


@triton.jit
def _store_heads(
    y, out_ptr, keys_ptr, values_ptr, norm_ptr, row, t, T, mask,
    HEADS: tl.constexpr, D: tl.constexpr, QK_NORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store y (BM, BN), which are whole heads of the queries, keys or values."""
    first = tl.program_id(1) * (BN // D)
    part, head = first // HEADS, first % HEADS + tl.arange(0, BN) // D
    places = (row * HEADS * T + t)[:, None] * D + (head * T * D + tl.arange(0, BN) % D)[None, :]
    y = _head_normed(y, part, norm_ptr, QK_NORM, D, BM, BN).to(out_ptr.dtype.element_ty)
    if part == 0:
        tl.store(out_ptr + places, y, mask=mask)
    elif part == 1:
        tl.store(keys_ptr + places, y, mask=mask)
    else:
        tl.store(values_ptr + places, y, mask=mask)


@triton.jit(do_not_specialize=["M", "T", "B"])
def _linear(
    x_ptr, weight_ptr, bias_ptr, out_ptr, scale_ptr, shift_ptr, gate_ptr, extra_ptr,
    keys_ptr, values_ptr, qk_norm_ptr, frames_ptr, residual_ptr,
    M, T, B, N, eps,
    C: tl.constexpr, PAD: tl.constexpr, NORM: tl.constexpr, MISH: tl.constexpr, EXTRA: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, QK_NORM: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute a tile. With TMA, x and weight, and without padding the residual, are descriptors. Then a tile has rows
    of the padded x (R, PAD + T, C), of which the last PAD of each R have no result."""
    wait(PDL)
    at = tl.program_id(0) * BM + tl.arange(0, BM)
    row, t = at // T, at % T
    m, inside = at, at < M
    if TMA and PAD > 0:
        row, t = at // (T + PAD), at % (T + PAD)
        m, inside = row * T + t, (t < T) & (row * T < M)
    if frames_ptr is not None:
        if _all_padding(row, t, inside, frames_ptr, B):
            return
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = inside[:, None] & (n < N)[None, :]
    if TMA:
        y = _tma_products(x_ptr, weight_ptr, C, PAD, BM, BN, BK)
    else:
        y = _products(
            x_ptr, weight_ptr, scale_ptr, shift_ptr, extra_ptr, m, row, inside, n, N, eps,
            C, PAD, NORM, MISH, EXTRA, BM, BN, BK,
        )  # fmt: skip
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    y = _activated(y, ACTIVATION)
    if HEADS:
        _store_heads(y, out_ptr, keys_ptr, values_ptr, qk_norm_ptr, row, t, T, mask, HEADS, D, QK_NORM, BM, BN)
    else:
        places = m[:, None] * N + n[None, :]
        if GATE:
            y *= tl.load(gate_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if RESIDUAL and TMA and PAD == 0:
            y += residual_ptr.load([tl.program_id(0) * BM, tl.program_id(1) * BN]).to(tl.float32)
        elif RESIDUAL:
            y += tl.load(residual_ptr + places, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + places, y.to(out_ptr.dtype.element_ty), mask=mask)


def prepared(
    x: Tensor,
    pad: int,
    *,
    norm: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-5,
    mish: bool = False,
    extra: Tensor | None = None,
    history: tuple[Tensor, Tensor, Tensor] | None = None,
    frames: Tensor | None = None,
) -> Tensor:
    """Make the input of a causal convolution of pad + 1 taps, or of a product: x (R, T, C) -> (R, pad + T, C).

    The other arguments are those of `linear`.
    """
    R, T, C = x.shape
    scale, shift = norm or (x, x)
    old, new, kept = history or (x, x, x)
    made, rows = x.new_empty(R, pad + T, C), R * (pad + T)
    wide, few = next_power_of_2(C), rows <= FEW_ROWS
    at_once = 2 if few or pad else 4
    _prepare[(cdiv(rows, at_once),)](
        x, scale, shift, extra, old, new, kept, frames, made, rows, T, len(kept if frames is None else frames), eps,
        C=C, PAD=pad, NORM=norm is not None, MISH=mish, EXTRA=extra is not None, HISTORY=history is not None,
        BM=at_once, WIDE=wide, num_warps=4 if few else max(1, wide // 512), **early(),
    )  # fmt: skip
    return made


@lru_cache(1024)
def _layout(dtype: torch.dtype, *sizes: int) -> dict[str, Any]:
    rows, columns, *block = sizes
    return vars(TensorDescriptor(torch.empty(0, dtype=dtype), [rows, columns], [columns, 1], block))


def _descriptor(x: Tensor, *sizes: int) -> TensorDescriptor:
    """Describe x, contiguous, as rows and columns in tiles of rows and columns. Triton's checks, which take longer than
    the rest of a launch, are made once for the same sizes."""
    made = object.__new__(TensorDescriptor)
    vars(made).update(_layout(x.dtype, *sizes), base=x)
    return made


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-5,
    mish: bool = False,
    extra: Tensor | None = None,
    history: tuple[Tensor, Tensor, Tensor] | None = None,
    activation: str = "",
    gate: Tensor | None = None,
    add_to: Tensor | None = None,
    heads: tuple[Tensor, Tensor, Tensor] | None = None,
    qk_norm: Tensor | None = None,
    frames: Tensor | None = None,
) -> Tensor:
    """Multiply x (R, T, C) by weight (N, taps * C) -> (R, T, N); with `add_to`, add the result to it in place.

    norm: scale and shift (C,) of a layer norm of x, followed by `mish`, then plus `extra` (C,). taps > 1: a causal
    convolution, oldest frame's tap first, preceded by zeros or by `history`: old and new (R, taps - 1, C), of which the
    new one is written, and the valid frames (B,) of each stream, B dividing R. activation: "gelu", "gelu_tanh", "silu"
    or "leaky_relu", after the bias. gate (N,): add_to += gate * result. heads: tensors (R, H, T, D) that receive the
    result split into queries, keys and values; queries and keys are normalised per head by `qk_norm` (2, 2, D), scale
    and shift of each. frames (B,): valid frames of each stream; what comes after them may be left as it is.
    """
    R, T, C = x.shape
    N, pad = weight.shape[0], weight.shape[1] // C - 1
    M, D = R * T, 0
    scale, shift = norm or (x, x)
    few = is_few(M, weight.numel())
    frames = None if few else frames  # to look at them would take longer than to compute their padding
    if pad or (norm is not None and not few):  # else each tile normalises its rows, which is faster for few tiles
        x = prepared(x, pad, norm=norm, eps=eps, mish=mish, extra=extra, history=history, frames=frames)
        norm, mish, extra = None, False, None
    if heads is not None:
        out, keys, values = heads
        D = out.shape[-1]
    else:
        out = keys = values = x.new_empty(R, T, N) if add_to is None else add_to
    tile, rows, residual = tiles(x.dtype).linear(M, N, weight.shape[1], D), M, add_to
    fetched = tiles(x.dtype).linear_tma(M, N, D) if uses_tma() and not few else None
    if fetched is not None and C % fetched.depth == 0:
        tile, rows = fetched, R * (pad + T)
        x = _descriptor(x, rows, C, tile.rows, tile.depth)
        weight = _descriptor(weight, N, (pad + 1) * C, tile.columns, tile.depth)
        if add_to is not None and pad == 0:
            residual = _descriptor(add_to, rows, N, tile.rows, tile.columns)
    _linear[(cdiv(rows, tile.rows), cdiv(N, tile.columns))](
        x, weight, bias, out, scale, shift, gate, extra, keys, values, qk_norm, frames, residual,
        M, T, R if frames is None else len(frames), N, eps,
        C=C, PAD=pad, NORM=norm is not None, MISH=mish, EXTRA=extra is not None,
        BIAS=bias is not None, ACTIVATION=activation, RESIDUAL=add_to is not None, GATE=gate is not None,
        HEADS=N // (3 * D) if D else 0, D=D, QK_NORM=qk_norm is not None, TMA=not isinstance(x, Tensor),
        BM=tile.rows, BN=tile.columns, BK=tile.depth, num_warps=tile.warps, num_stages=tile.stages, **early(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M"])
def _add_norm_mish(
    x_ptr, scale_ptr, shift_ptr, out_ptr, M, C: tl.constexpr, BM: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait(PDL)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.arange(0, WIDE)
    mask = (m < M)[:, None] & (k < C)[None, :]
    places = m[:, None] * C + k[None, :]
    x = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)
    x = tl.where(mask, x - (tl.sum(x, 1) / C)[:, None], 0.0)
    x *= (1 / tl.sqrt(tl.sum(x * x, 1) / C + 1e-5))[:, None]
    scale = tl.load(scale_ptr + k, mask=k < C, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + k, mask=k < C, other=0.0).to(tl.float32)
    y = _mish(x * scale[None, :] + shift[None, :]) + tl.load(out_ptr + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, y.to(out_ptr.dtype.element_ty), mask=mask)


def add_norm_mish(x: Tensor, norm: tuple[Tensor, Tensor], add_to: Tensor) -> Tensor:
    """Add mish(layer norm of x) to `add_to` in place: x and add_to (..., C); norm: scale and shift (C,)."""
    C = x.shape[-1]
    rows = x.numel() // C
    _add_norm_mish[(cdiv(rows, 8),)](x, *norm, add_to, rows, C=C, BM=8, WIDE=next_power_of_2(C), **early())
    return add_to


# cuDNN computes one of 16 groups as 16 convolutions, one after another, and changes the layout before and after each.
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
