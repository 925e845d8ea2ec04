"""The parts of a decoder that computes one token, or a piece of a prompt, of many sequences.

The residual stream x (T, K) is float32. A root mean square norm, whose weights are a part of the matrix behind it, only
scales the rows of the product. For few tokens a product takes as long as its weights are read: there, norm, product and
what follows it are one kernel, which sums the squares while it reads x. Many tokens' products are a library's, with
small kernels between them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cosyvoice_triton.kernels.launch import cdiv, early, next_power_of_2, wait
from cosyvoice_triton.kernels.tiles import ProductTile

PRODUCT_PROGRAMS = 256  # programs of a product at least, so that all of a GPU reads weights
COLUMNS = 1024  # columns of a program that computes no products
INTERLEAVE = tl.constexpr(8)  # a weight has 8 gate rows, then their 8 up rows: one thread has both after a product


@triton.jit
def _products(
    x_ptr, weight_ptr, m, first, second, T, rows, eps, begin,
    K: tl.constexpr, PART: tl.constexpr, NORM: tl.constexpr, PAIR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Multiply rows m (BM,) of x (T, K) by the rows `first` (BN,) of the weight and, if PAIR, by `second`.

    Weight rows from `rows` on are zeros. Of the sums over K, only the PART terms from `begin` are computed.
    One row is multiplied without a product of matrices, so that nothing but the reading of the weights takes time.
    """
    lane = tl.arange(0, BK)
    if BM == 1:
        sums = tl.zeros((BN, BK), tl.float32)
        other_sums = tl.zeros((BN, BK), tl.float32)
    one = tl.zeros((BM, BN), tl.float32)
    other = tl.zeros((BM, BN), tl.float32)
    squares = tl.zeros((BM, BK), tl.float32)
    for start in range(0, PART, BK):
        k = begin + start + lane
        wide = (k < K)[None, :]
        # (BM, BK)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=(m < T)[:, None] & wide, other=0.0)
        if NORM:
            squares += x * x
        x = x.to(weight_ptr.dtype.element_ty)
        w = tl.load(weight_ptr + first[:, None] * K + k[None, :], mask=(first < rows)[:, None] & wide, other=0.0)
        if BM == 1:
            sums += x.to(tl.float32) * w.to(tl.float32)
        else:
            one = tl.dot(x, tl.trans(w), one, input_precision="ieee")
        if PAIR:
            w = tl.load(weight_ptr + second[:, None] * K + k[None, :], mask=(second < rows)[:, None] & wide, other=0.0)
            if BM == 1:
                other_sums += x.to(tl.float32) * w.to(tl.float32)
            else:
                other = tl.dot(x, tl.trans(w), other, input_precision="ieee")
    if BM == 1:
        one = tl.sum(sums, 1)[None, :]
        other = tl.sum(other_sums, 1)[None, :]
    if NORM:
        scale = 1 / tl.sqrt(tl.sum(squares, 1) / K + eps)
        one *= scale[:, None]
        other *= scale[:, None]
    return one, other


@triton.jit
def store_rotated(
    one, other, q_ptr, keys_ptr, values_ptr, m, head, column, position, page, cosine, sine, mask,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Rotate columns of the first half of a head, `one` (BM, BN), with those of the second half, and store both."""
    HALF: tl.constexpr = D // 2
    if head < H + KV:
        rotated = one * cosine - other * sine
        other = other * cosine + one * sine
        one = rotated
    if head < H:
        target = q_ptr + (m[:, None] * H + head) * D + column[None, :]
        tl.store(target, one.to(q_ptr.dtype.element_ty), mask=mask)
        tl.store(target + HALF, other.to(q_ptr.dtype.element_ty), mask=mask)
    else:
        of_head = page * KV + (head - H) % KV
        place = (of_head * PAGE + position % PAGE)[:, None] * D + column[None, :]
        if head < H + KV:
            tl.store(keys_ptr + place, one.to(keys_ptr.dtype.element_ty), mask=mask)
            tl.store(keys_ptr + place + HALF, other.to(keys_ptr.dtype.element_ty), mask=mask)
        else:
            tl.store(values_ptr + place, one.to(values_ptr.dtype.element_ty), mask=mask)
            tl.store(values_ptr + place + HALF, other.to(values_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _project_heads(
    x_ptr, weight_ptr, bias_ptr, q_ptr, keys_ptr, values_ptr, tables_ptr, slots_ptr, positions_ptr, rotary_ptr,
    T, eps, pages, context,
    K: tl.constexpr, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute a part of one head: BN of its first D / 2 columns, and those that are rotated with them."""
    HALF: tl.constexpr = D // 2
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    head = tl.program_id(1) // (HALF // BN)
    column = tl.program_id(1) % (HALF // BN) * BN + tl.arange(0, BN)
    row = head * D + column
    wait(PDL)
    # What the product does not need is loaded before it, so that nothing waits for it afterwards.
    inside = m < T
    mask = inside[:, None] & (column < HALF)[None, :]
    position = tl.load(positions_ptr + m, mask=inside, other=0)
    slot = tl.load(slots_ptr + m, mask=inside, other=0)
    page = tl.load(tables_ptr + slot * pages + position // PAGE, mask=inside, other=0)
    angles = position[:, None] * HALF + column[None, :]
    cosine = tl.load(rotary_ptr + angles, mask=mask, other=0.0)
    sine = tl.load(rotary_ptr + context * HALF + angles, mask=mask, other=0.0)
    bias = tl.load(bias_ptr + row).to(tl.float32)
    other_bias = tl.load(bias_ptr + row + HALF).to(tl.float32)
    one, other = _products(
        x_ptr, weight_ptr, m, row, row + HALF, T, (H + 2 * KV) * D, eps, 0, K, K, True, True, BM, BN, BK
    )  # fmt: skip
    one += bias[None, :]
    other += other_bias[None, :]
    store_rotated(
        one, other, q_ptr, keys_ptr, values_ptr, m, head, column, position, page, cosine, sine, mask, H, KV, D, PAGE
    )  # fmt: skip


def project_heads(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, keys: Tensor, values: Tensor, tables: Tensor, slots: Tensor,
    positions: Tensor, rotary: Tensor, tile: ProductTile,
) -> Tensor:  # fmt: skip
    """Apply RMS norm, product and RoPE to few tokens: x (T, K), weight ((H + 2 KV) * D, K), bias -> queries (T, H, D).

    New keys and values are stored in keys, values (pages, KV, PAGE, D): `tables` (slots, pages of a sequence) has
    the page, `slots` and `positions` (T,) are those of the tokens. rotary (2, context, D / 2) float32: cosine, sine.
    """
    (T, K), (_, KV, PAGE, D) = x.shape, keys.shape
    H = len(weight) // D - 2 * KV
    q = torch.empty(T, H, D, dtype=weight.dtype, device=x.device)
    columns = min(tile.columns, D // 2)
    _project_heads[(cdiv(T, tile.rows), (H + 2 * KV) * (D // 2 // columns))](
        x, weight, bias, q, keys, values, tables, slots, positions, rotary, T, eps, tables.shape[1], rotary.shape[1],
        K=K, H=H, KV=KV, D=D, PAGE=PAGE, BM=tile.rows, BN=columns, BK=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages, **early(),
    )  # fmt: skip
    return q


@triton.jit
def _in_range(x, like_ptr):
    """Clamp x to what a float16 tensor can hold: LLMs have a few activations beyond it, and one infinity makes a whole
    answer NaN. Other types have float32's range."""
    if like_ptr.dtype.element_ty == tl.float16:
        x = tl.clamp(x, -65504.0, 65504.0)
    return x


@triton.jit
def _row_of_gate(n):
    """Return the row of gate n in a weight of interleaved gate and up rows; its up row is INTERLEAVE rows further."""
    return n // INTERLEAVE * (2 * INTERLEAVE) + n % INTERLEAVE


@triton.jit(do_not_specialize=["T"])
def _gated(
    x_ptr, weight_ptr, out_ptr, T, eps,
    K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    wait(PDL)
    row = _row_of_gate(n)
    gate, up = _products(x_ptr, weight_ptr, m, row, row + INTERLEAVE, T, 2 * N, eps, 0, K, K, True, True, BM, BN, BK)
    result = _in_range(gate * tl.sigmoid(gate) * up, out_ptr)
    mask = (m < T)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + m[:, None] * N + n[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)


def gated(x: Tensor, weight: Tensor, eps: float, tile: ProductTile) -> Tensor:
    """Compute RMS norm, product and SwiGLU of few tokens: x (T, K), interleaved gate and up weights (2 N, K) ->
    silu(gate) * up (T, N)."""
    (T, K), N = x.shape, len(weight) // 2
    out = torch.empty(T, N, dtype=weight.dtype, device=x.device)
    _gated[(cdiv(T, tile.rows), cdiv(N, tile.columns))](
        x, weight, out, T, eps, K=K, N=N, BM=tile.rows, BN=tile.columns, BK=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages, **early(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["T"])
def _project(
    x_ptr, weight_ptr, out_ptr, parts_ptr, arrived_ptr, copy_ptr, squares_ptr, T, N, eps,
    K: tl.constexpr, PART: tl.constexpr, SPLITS: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute a part of a tile's sums. The last of its SPLITS programs adds them, always in the same order."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    split = tl.program_id(2)
    places = out_ptr + m[:, None] * N + n[None, :]
    mask = (m < T)[:, None] & (n < N)[None, :]
    wait(PDL)
    if ADD:  # before the product, so that nothing waits for it afterwards
        before = tl.load(places, mask=mask, other=0.0)
    result, _ = _products(
        x_ptr, weight_ptr, m, n, n, T, N, eps, split * PART, K, PART, NORM, False, BM, BN, BK
    )  # fmt: skip
    last = True
    if SPLITS > 1:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        parts = parts_ptr + tile * SPLITS * BM * BN + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        tl.store(parts + split * BM * BN, result)
        tl.debug_barrier()
        last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(arrived_ptr + tile, 0)
            result = tl.zeros((BM, BN), tl.float32)
            for part in tl.static_range(SPLITS):
                result += tl.load(parts + part * BM * BN, cache_modifier=".cg")
    if last:
        if ADD:
            result += before
        tl.store(places, result, mask=mask)
        if copy_ptr is not None:
            tl.store(copy_ptr + m[:, None] * N + n[None, :], result.to(copy_ptr.dtype.element_ty), mask=mask)
            squares = tl.sum(tl.where(mask, result * result, 0.0), 1)
            tl.store(squares_ptr + m * tl.num_programs(1) + tl.program_id(1), squares, mask=m < T)


def linear_residual(
    y: Tensor, weight: Tensor, x: Tensor, arrived: Tensor, tile: ProductTile, *, cast: bool = False
) -> tuple[Tensor, Tensor] | None:
    """Add the product y (T, K) weight^T (K, N) to x (T, N) in place, for few tokens.

    arrived: int32, zeros, at least as many as the product has tiles; zeros again afterwards. cast: returns the new x in
    the weight's type, and (T, tiles) sums of its squares.
    """
    rounded = None
    if cast:
        rounded = torch.empty_like(x, dtype=weight.dtype), x.new_empty(len(x), cdiv(len(weight), tile.columns))
    blocks = cdiv(y.shape[1], tile.depth)
    programs = cdiv(len(y), tile.rows) * cdiv(len(weight), tile.columns)
    splits = max(1, min(PRODUCT_PROGRAMS // programs, blocks // 2))
    splits = next_power_of_2(splits + 1) // 2
    assert programs <= len(arrived)
    parts = torch.empty(programs * splits if splits > 1 else 0, tile.rows, tile.columns, device=x.device)
    _launch_project(y, weight, x, 0.0, tile, parts, arrived, splits, rounded, norm=False, add=True)
    return rounded


def rms_norm_linear(x: Tensor, weight: Tensor, eps: float, tile: ProductTile) -> Tensor:
    """Compute RMS norm and product: x (T, K), weight (N, K) -> (T, N) float32."""
    out = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
    _launch_project(x, weight, out, eps, tile, out, out, 1, None, norm=True, add=False)
    return out


def _launch_project(
    x: Tensor, weight: Tensor, out: Tensor, eps: float, tile: ProductTile, parts: Tensor, arrived: Tensor, splits: int,
    rounded: tuple[Tensor, Tensor] | None, *, norm: bool, add: bool,
) -> None:  # fmt: skip
    (T, K), N = x.shape, len(weight)
    part = cdiv(cdiv(K, tile.depth), splits) * tile.depth
    _project[(cdiv(T, tile.rows), cdiv(N, tile.columns), splits)](
        x, weight, out, parts, arrived, *(rounded or (None, None)), T, N, eps,
        K=K, PART=part, SPLITS=splits, NORM=norm, ADD=add,
        BM=tile.rows, BN=tile.columns, BK=tile.depth, num_warps=tile.warps, num_stages=tile.stages, **early(),
    )  # fmt: skip


@triton.jit
def _rms_norm(x_ptr, y_ptr, out_ptr, eps, K: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr):
    wait(PDL)
    row, k = tl.program_id(0), tl.arange(0, WIDE)
    x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0)
    if ADD:
        x += _in_range(tl.load(y_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32), y_ptr)
        tl.store(x_ptr + row * K + k, x, mask=k < K)
    scale = 1 / tl.sqrt(tl.sum(x * x, 0) / K + eps)
    tl.store(out_ptr + row * K + k, (x * scale).to(out_ptr.dtype.element_ty), mask=k < K)


def rms_norm(x: Tensor, eps: float, dtype: torch.dtype, added: Tensor | None = None) -> Tensor:
    """Divide x (T, K) float32 by its root mean square -> (T, K) of `dtype`. Before, x += added, in place."""
    out = torch.empty_like(x, dtype=dtype)
    K, y = x.shape[1], x if added is None else added
    _rms_norm[(len(x),)](
        x, y, out, eps, K=K, ADD=added is not None, WIDE=next_power_of_2(K), num_warps=4, **early()
    )  # fmt: skip
    return out


@triton.jit
def _apply_rope(
    heads_ptr, q_ptr, keys_ptr, values_ptr, tables_ptr, slots_ptr, positions_ptr, rotary_ptr, pages, context,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate all heads (HEADS,) of one token: half of their columns (D / 2,) with the other half."""
    wait(PDL)
    HALF: tl.constexpr = D // 2
    t, head, column = tl.program_id(0), tl.arange(0, HEADS), tl.arange(0, HALF)
    position = tl.load(positions_ptr + t)
    page = tl.load(tables_ptr + tl.load(slots_ptr + t) * pages + position // PAGE)
    mask = (head < H + 2 * KV)[:, None]
    source = heads_ptr + (t * (H + 2 * KV) + head)[:, None] * D + column[None, :]
    one = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    cosine = tl.load(rotary_ptr + position * HALF + column)[None, :]
    sine = tl.load(rotary_ptr + (context + position) * HALF + column)[None, :]
    is_rotated = (head < H + KV)[:, None]
    rotated = tl.where(is_rotated, one * cosine - other * sine, one)
    other = tl.where(is_rotated, other * cosine + one * sine, other).to(q_ptr.dtype.element_ty)
    one = rotated.to(q_ptr.dtype.element_ty)
    target = q_ptr + (t * H + head)[:, None] * D + column[None, :]
    of_queries = (head < H)[:, None]
    tl.store(target, one, mask=of_queries)
    tl.store(target + HALF, other, mask=of_queries)
    place = ((page * KV + (head - H) % KV) * PAGE + position % PAGE)[:, None] * D + column[None, :]
    of_keys = ((head >= H) & (head < H + KV))[:, None]
    tl.store(keys_ptr + place, one, mask=of_keys)
    tl.store(keys_ptr + place + HALF, other, mask=of_keys)
    of_values = ((head >= H + KV) & (head < H + 2 * KV))[:, None]
    tl.store(values_ptr + place, one, mask=of_values)
    tl.store(values_ptr + place + HALF, other, mask=of_values)


def apply_rope(
    heads: Tensor, keys: Tensor, values: Tensor, tables: Tensor, slots: Tensor, positions: Tensor, rotary: Tensor
) -> Tensor:
    """Apply RoPE to queries and keys: heads (T, (H + 2 KV) * D) -> queries (T, H, D).

    Keys and values are stored in their pages; the other arguments are those of `project_heads`.
    """
    T, (_, KV, PAGE, D) = len(heads), keys.shape
    H = heads.shape[1] // D - 2 * KV
    q = torch.empty(T, H, D, dtype=heads.dtype, device=heads.device)
    _apply_rope[(T,)](
        heads, q, keys, values, tables, slots, positions, rotary, tables.shape[1], rotary.shape[1],
        H=H, KV=KV, D=D, PAGE=PAGE, HEADS=next_power_of_2(H + 2 * KV), num_warps=4, **early(),
    )  # fmt: skip
    return q


@triton.jit
def _silu_and_mul(pairs_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait(PDL)
    row, n = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pairs = pairs_ptr + row * 2 * N + _row_of_gate(n)
    gate = _in_range(tl.load(pairs, mask=n < N, other=0.0).to(tl.float32), pairs_ptr)
    up = _in_range(tl.load(pairs + INTERLEAVE, mask=n < N, other=0.0).to(tl.float32), pairs_ptr)
    result = _in_range(gate * tl.sigmoid(gate) * up, out_ptr)
    tl.store(out_ptr + row * N + n, result.to(out_ptr.dtype.element_ty), mask=n < N)


def silu_and_mul(pairs: Tensor) -> Tensor:
    """Compute SwiGLU of interleaved gates and ups: (T, 2 N) -> silu(gate) * up (T, N)."""
    T, N = len(pairs), pairs.shape[1] // 2
    out = torch.empty(T, N, dtype=pairs.dtype, device=pairs.device)
    _silu_and_mul[(T, cdiv(N, COLUMNS))](pairs, out, N=N, BLOCK=COLUMNS, num_warps=4, **early())
    return out
