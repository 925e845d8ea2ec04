"""Convolutions over frames, each with what follows it: bias, residual paths and activations.

A convolution is a matrix product whose left operand is gathered from the frames around each frame of its output. Frames
are (T, C): the channels of each are adjacent. Rows of a batch have lengths of their own: frames after a row's end are
read as zeros, whatever is stored there, and are not computed.
"""

import math
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cosyvoice_triton.kernels.launch import cdiv, early, next_power_of_2, wait
from cosyvoice_triton.kernels.tiles import tiles

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: a float32 of this size has no digits after the point


@triton.jit
def _snake_of(x, frequency, amplitude):
    """Compute x + amplitude * sin(pi * frequency * x)^2: x (M, N), the others (N,), float32.

    The sine's own code for large angles needs a stack. sin(pi f)^2 has the period 1, and for |f| <= 1/2 this polynomial
    in f^2 has an error of at most 7e-7.
    """
    f = x * frequency[None, :]
    f -= (f + ROUND) - ROUND
    f *= f
    wave = f * 10.581299781799316 - 29.426273345947266
    wave = wave * f + 42.64342498779297
    wave = wave * f - 32.46514129638672
    wave = wave * f + 9.869524955749512
    return x + wave * f * amplitude[None, :]


@triton.jit
def _taps_of(branch, STARTS: tl.constexpr, BRANCHES: tl.constexpr):
    """Return the first tap of a branch and the one after its last."""
    begin, end = branch * 0, branch * 0 + STARTS[1]
    for i in tl.static_range(1, BRANCHES):
        begin = tl.where(branch == i, STARTS[i], begin)
        end = tl.where(branch == i, STARTS[i + 1], end)
    return begin, end


@triton.jit
def _adjacent_products(
    acc, x_row, weights, wide, t, stride, spare, length, C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Add to acc (BM, BN) a convolution of frames that are adjacent in memory, as their channels are: a sum of K terms.

    weights (BN, 1): of each channel of the output. spare: frames that the taps reach beyond a stride.
    """
    lane = tl.arange(0, BK)
    begins = (t * stride - spare // 2) * C
    for start in range(0, K, BK):
        k = start + lane
        at = begins[:, None] + k[None, :]
        x = tl.load(x_row + at, mask=(at >= 0) & (at < length * C), other=0.0)
        w = tl.load(weights + k[None, :], mask=wide[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _tap_products(
    acc, x_row, x_plane, weights, wide, t, dilation, branch, length,
    C: tl.constexpr, STARTS: tl.constexpr, BRANCHES: tl.constexpr, MERGED: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Add to acc (BM, BN) a convolution, or the sum of those of all branches, tap by tap."""
    PARTS: tl.constexpr = (C + BK - 1) // BK  # of a tap
    lane = tl.arange(0, BK)
    first, last = _taps_of(branch, STARTS, BRANCHES)
    if MERGED:
        last = STARTS[BRANCHES]
    for i in range(first * PARTS, last * PARTS):
        tap, k = i // PARTS, i % PARTS * BK + lane
        of = branch
        if MERGED:
            for other in tl.static_range(1, BRANCHES):
                of = tl.where(tap >= STARTS[other], other, of)
        begin, end = _taps_of(of, STARTS, BRANCHES)
        at = t + (tap - begin) * dilation - (end - begin - 1) * dilation // 2
        mask = ((at >= 0) & (at < length))[:, None] & (k < C)[None, :]
        x = tl.load(x_row + of * x_plane + at[:, None] * C + k[None, :], mask=mask, other=0.0)
        w = tl.load(weights + tap * C + k[None, :], mask=wide[:, None] & (k < C)[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _store_activated(
    y, active_ptr, snake_ptr, slope, branch, plane, places, n, wide, mask, N: tl.constexpr, COPIES: tl.constexpr
):  # fmt: skip
    # Rounded, it moves between threads in 16 bits, and to where each needs the factors of few channels.
    y = y.to(active_ptr.dtype.element_ty).to(tl.float32)
    for copy in tl.static_range(COPIES):
        if snake_ptr is None:
            active = tl.where(y > 0, y, y * slope)
        else:
            factors = snake_ptr + 2 * (branch + copy) * N + n
            frequency = tl.load(factors, mask=wide, other=0.0)
            active = _snake_of(y, frequency, tl.load(factors + N, mask=wide, other=0.0))
        target = active_ptr + (branch + copy) * plane + places
        tl.store(target, active.to(active_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _residuals(
    residual_ptr, added_ptr, row, branch, t, n, places, mask, residual_frames, T_OUT,
    N: tl.constexpr, BRANCHES: tl.constexpr, MERGED: tl.constexpr, MIRRORED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Load what a convolution is added to -> (BM, BN)."""
    acc = tl.zeros((BM, BN), tl.float32)
    if residual_ptr is not None:
        residual_plane = residual_frames.to(tl.int64) * N
        residual = residual_ptr + branch * residual_plane + places
        acc = tl.load(residual, mask=mask, other=0.0).to(tl.float32)
        if MERGED:
            for other in tl.static_range(1, BRANCHES):
                acc += tl.load(residual + other * residual_plane, mask=mask, other=0.0).to(tl.float32)
    if added_ptr is not None:
        at = row * (T_OUT - MIRRORED) + tl.abs(t - MIRRORED)
        acc += tl.load(added_ptr + at[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
    return acc


@triton.jit(do_not_specialize=["T", "T_OUT", "rate", "more", "dilation", "stride", "residual_frames"])
def _convolve_frames(
    x_ptr, weight_ptr, bias_ptr, frames_ptr, residual_ptr, added_ptr, out_ptr, active_ptr, snake_ptr,
    T, T_OUT, rate, more, dilation, stride, residual_frames, slope,
    C: tl.constexpr, N: tl.constexpr, STARTS: tl.constexpr, BRANCHES: tl.constexpr, MERGED: tl.constexpr,
    ADJACENT: tl.constexpr, MIRRORED: tl.constexpr, COPIES: tl.constexpr, CHANNELS_FIRST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute a tile. STARTS has the first tap of each branch, and the number of all taps."""
    wait(PDL)
    TILES: tl.constexpr = (N + BN - 1) // BN  # of the same frames
    K: tl.constexpr = STARTS[BRANCHES] * C
    row, branch = tl.program_id(1).to(tl.int64), tl.program_id(2)
    spare = (STARTS[1] - 1) * dilation + 1 - stride
    length = tl.minimum(tl.load(frames_ptr + row).to(tl.int32) * rate + more, T)
    count = (length - spare % 2) // stride
    first = tl.program_id(0) // TILES * BM
    if first >= count:
        return
    t = first + tl.arange(0, BM)
    n = tl.program_id(0) % TILES * BN + tl.arange(0, BN)
    wide = n < N
    mask = (t < count)[:, None] & wide[None, :]
    places = (row * T_OUT + t)[:, None] * N + n[None, :]
    # What is added to the products comes first: after them, registers are scarce.
    acc = _residuals(
        residual_ptr, added_ptr, row, branch, t, n, places, mask, residual_frames, T_OUT,
        N, BRANCHES, MERGED, MIRRORED, BM, BN,
    )  # fmt: skip
    x_row = x_ptr + row * T * C
    weights = weight_ptr + n[:, None] * K
    if ADJACENT:
        acc = _adjacent_products(acc, x_row, weights, wide, t, stride, spare, length, C, K, BK)
    else:
        x_plane = tl.num_programs(1).to(tl.int64) * T * C
        acc = _tap_products(
            acc, x_row, x_plane, weights, wide, t, dilation, branch, length, C, STARTS, BRANCHES, MERGED, BK
        )  # fmt: skip
    y = acc + tl.load(bias_ptr + branch * N + n, mask=wide, other=0.0).to(tl.float32)[None, :]
    if MERGED:
        y *= 1 / BRANCHES
    plane = tl.num_programs(1).to(tl.int64) * T_OUT * N
    if out_ptr is not None:
        y = y.to(out_ptr.dtype.element_ty)
        out = (
            out_ptr + (row * N + n)[None, :] * T_OUT + t[:, None]
            if CHANNELS_FIRST
            else out_ptr + branch * plane + places
        )
        tl.store(out, y, mask=mask)
    if active_ptr is not None:
        _store_activated(y, active_ptr, snake_ptr, slope, branch, plane, places, n, wide, mask, N, COPIES)


class FrameConvolution(NamedTuple):
    """One convolution, or parallel ones between the same numbers of channels.

    weight (N, taps * C): the taps of each one after another, of the earliest frame first. bias (branches, N), or their
    sum (1, N) where the results are added. taps: how many each has.
    """

    weight: Tensor
    bias: Tensor
    taps: tuple[int, ...]


class Lengths(NamedTuple):
    """The lengths of a batch's rows: rate * frames (B,) + more."""

    frames: Tensor
    rate: int
    more: int = 0


def snake_factors(alpha: Tensor) -> Tensor:
    """Return the factors of the activation x + sin(alpha x)^2 / alpha that `convolve_frames` takes: alpha (*, N) ->
    (*, 2, N) float32."""
    alpha = alpha.float()
    return torch.stack([alpha / math.pi, 1 / (alpha + 1e-9)], dim=-2)


def convolve_frames(
    x: Tensor,
    conv: FrameConvolution,
    lengths: Lengths,
    *,
    dilation: int = 1,
    stride: int = 1,
    residual: Tensor | None = None,
    added: Tensor | None = None,
    out: Tensor | None = None,
    active: Tensor | None = None,
    snake: Tensor | None = None,
    slope: float = 0.0,
) -> None:
    """Convolve rows x (B, T, C) of those lengths; write the result to `out` (B, T', N) and, activated, to `active`.

    At least one of both is given; after a row's end they keep what they held. T' is T / stride, rounded down, and the
    padding is half of what the taps reach beyond a stride. Of parallel convolutions x, out and active are
    (branches, B, T, *), or if these two are not, they receive the mean over the branches, whose taps are then odd.

    residual (B, T', N), or one for each branch: added to the convolution; may be `out`. added (B, T', N): the same, or
    (B, T' - 1, N), with its second frame once more before its first one. The activation is a leaky ReLU with that slope
    or, given `snake_factors` (branches, 2, N), a snake; several of them without branches, (copies, 2, N), make an
    `active` of (copies, B, T', N). out may be a view of a tensor (B, N, T').
    """
    made = active if out is None else out
    assert made is not None, "nothing to write to"
    (B, T, C), (T_OUT, N), branches = x.shape[-3:], made.shape[-2:], len(conv.taps)
    merged = branches > 1 and made.ndim == 3
    programs = 1 if merged else branches
    tile = tiles(x.dtype).frames(B, T_OUT, N, programs)
    depth = min(tile.depth, max(16, next_power_of_2(C)))
    adjacent = branches == dilation == 1 and (stride > 1 or C % depth != 0)
    _convolve_frames[(cdiv(T_OUT, tile.rows) * cdiv(N, tile.columns), B, programs)](
        x, conv.weight, conv.bias, lengths.frames, residual, added, out, active, snake,
        T, T_OUT, lengths.rate, lengths.more, dilation, stride,
        0 if residual is None or residual.ndim == 3 else B * T_OUT, slope,
        C=C, N=N, STARTS=(0, *accumulate(conv.taps)), BRANCHES=branches, MERGED=merged,
        ADJACENT=adjacent, MIRRORED=0 if added is None else T_OUT - added.shape[1],
        COPIES=1 if active is None or active.ndim == 3 else len(active) // programs,
        CHANNELS_FIRST=out is not None and out.stride(-1) != 1,
        BM=tile.rows, BN=tile.columns, BK=tile.depth if adjacent else depth,
        num_warps=tile.warps, num_stages=tile.stages, **early(),
    )  # fmt: skip


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
