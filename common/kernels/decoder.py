"""The parts of a decoder that computes one token, or a piece of a prompt, of many sequences.

The residual stream x (T, K) is float32. A root mean square norm, whose weights are a part of the matrix behind it, only
scales the rows of the product: the squares are summed while the product reads x.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.tiles import tiles

LOG2_E = 1.4426950408889634
MOST_SPLITS = 16
PROGRAMS = 128  # of attention, which a GPU runs at once


@triton.jit
def _products(
    x_ptr, weight_ptr, m, first, second, T, rows, eps,
    K: tl.constexpr, NORM: tl.constexpr, PAIR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Rows m (BM,) of x (T, K) times the rows `first` (BN,) of the weight and, if PAIR, `second`, if below `rows`."""
    lane = tl.arange(0, BK)
    one = tl.zeros((BM, BN), tl.float32)
    other = tl.zeros((BM, BN), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    for start in range(0, K, BK):
        k = start + lane
        wide = (k < K)[None, :]
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=(m < T)[:, None] & wide, other=0.0)
        if NORM:
            squares += tl.sum(x * x, 1)
        x = x.to(weight_ptr.dtype.element_ty)
        w = tl.load(weight_ptr + first[:, None] * K + k[None, :], mask=(first < rows)[:, None] & wide, other=0.0)
        one = tl.dot(x, tl.trans(w), one, input_precision="ieee")
        if PAIR:
            w = tl.load(weight_ptr + second[:, None] * K + k[None, :], mask=(second < rows)[:, None] & wide, other=0.0)
            other = tl.dot(x, tl.trans(w), other, input_precision="ieee")
    if NORM:
        scale = 1 / tl.sqrt(squares / K + eps)
        one *= scale[:, None]
        other *= scale[:, None]
    return one, other


@triton.jit(do_not_specialize=["T"])
def _project_heads(
    x_ptr, weight_ptr, bias_ptr, q_ptr, keys_ptr, values_ptr, tables_ptr, slots_ptr, positions_ptr, rotary_ptr,
    T, eps, pages, context,
    K: tl.constexpr, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile is a part of one head: BN of its first D / 2 columns, and those that are turned with them."""
    HALF: tl.constexpr = D // 2
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    head = tl.program_id(1) // (HALF // BN)
    column = tl.program_id(1) % (HALF // BN) * BN + tl.arange(0, BN)
    row = head * D + column
    one, other = _products(
        x_ptr, weight_ptr, m, row, row + HALF, T, (H + 2 * KV) * D, eps, K, True, True, BM, BN, BK
    )  # fmt: skip
    one += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    other += tl.load(bias_ptr + row + HALF).to(tl.float32)[None, :]
    inside = m < T
    mask = inside[:, None] & (column < HALF)[None, :]
    position = tl.load(positions_ptr + m, mask=inside, other=0)
    if head < H + KV:
        angles = position[:, None] * HALF + column[None, :]
        cosine = tl.load(rotary_ptr + angles, mask=mask, other=0.0)
        sine = tl.load(rotary_ptr + context * HALF + angles, mask=mask, other=0.0)
        turned = one * cosine - other * sine
        other = other * cosine + one * sine
        one = turned
    if head < H:
        target = q_ptr + (m[:, None] * H + head) * D + column[None, :]
        tl.store(target, one.to(q_ptr.dtype.element_ty), mask=mask)
        tl.store(target + HALF, other.to(q_ptr.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots_ptr + m, mask=inside, other=0)
        page = tl.load(tables_ptr + slot * pages + position // PAGE, mask=inside, other=0)
        of_head = page * KV + (head - H) % KV
        place = (of_head * PAGE + position % PAGE)[:, None] * D + column[None, :]
        if head < H + KV:
            tl.store(keys_ptr + place, one.to(keys_ptr.dtype.element_ty), mask=mask)
            tl.store(keys_ptr + place + HALF, other.to(keys_ptr.dtype.element_ty), mask=mask)
        else:
            tl.store(values_ptr + place, one.to(values_ptr.dtype.element_ty), mask=mask)
            tl.store(values_ptr + place + HALF, other.to(values_ptr.dtype.element_ty), mask=mask)


def project_heads(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, keys: Tensor, values: Tensor, tables: Tensor, slots: Tensor,
    positions: Tensor, rotary: Tensor,
) -> Tensor:  # fmt: skip
    """x (T, K), weight ((H + 2 KV) * D, K), bias -> queries (T, H, D) after norm and rotary embedding.

    Keys and values go to their places in keys, values (pages, KV, PAGE, D): `tables` (slots, pages of a sequence) has
    the page, `slots` and `positions` (T,) are those of the tokens. rotary (2, context, D / 2) float32: cosine, sine.
    """
    (T, K), (_, KV, PAGE, D) = x.shape, keys.shape
    H = len(weight) // D - 2 * KV
    q = torch.empty(T, H, D, dtype=weight.dtype, device=x.device)
    tile = tiles(weight.dtype).decoder(T)
    columns = min(tile.columns, D // 2)
    _project_heads[(triton.cdiv(T, tile.rows), (H + 2 * KV) * (D // 2 // columns))](
        x, weight, bias, q, keys, values, tables, slots, positions, rotary, T, eps, tables.shape[1], rotary.shape[1],
        K=K, H=H, KV=KV, D=D, PAGE=PAGE, BM=tile.rows, BN=columns, BK=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return q


@triton.jit(do_not_specialize=["T"])
def _gated(
    x_ptr, weight_ptr, out_ptr, T, eps,
    K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    gate, up = _products(x_ptr, weight_ptr, m, n, n + N, T, 2 * N, eps, K, True, True, BM, BN, BK)
    result = gate * tl.sigmoid(gate) * up
    mask = (m < T)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + m[:, None] * N + n[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)


def gated(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (T, K), weight (2 N, K): gates, then values -> silu(gate) * value (T, N) of the normalised x."""
    (T, K), N = x.shape, len(weight) // 2
    out = torch.empty(T, N, dtype=weight.dtype, device=x.device)
    tile = tiles(weight.dtype).decoder(T)
    _gated[(triton.cdiv(T, tile.rows), triton.cdiv(N, tile.columns))](
        x, weight, out, T, eps, K=K, N=N, BM=tile.rows, BN=tile.columns, BK=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["T"])
def _project(
    x_ptr, weight_ptr, out_ptr, T, N, eps,
    K: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    result, _ = _products(x_ptr, weight_ptr, m, n, n, T, N, eps, K, NORM, False, BM, BN, BK)
    places = out_ptr + m[:, None] * N + n[None, :]
    mask = (m < T)[:, None] & (n < N)[None, :]
    if ADD:
        result += tl.load(places, mask=mask, other=0.0)
    tl.store(places, result, mask=mask)


def project_add(y: Tensor, weight: Tensor, x: Tensor) -> None:
    """x (T, N) += y (T, K) weight^T (K, N)"""
    _launch_project(y, weight, x, 0.0, norm=False, add=True)


def project_normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (T, K), weight (N, K) -> (T, N) float32 of the normalised x."""
    out = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
    _launch_project(x, weight, out, eps, norm=True, add=False)
    return out


def _launch_project(x: Tensor, weight: Tensor, out: Tensor, eps: float, *, norm: bool, add: bool) -> None:
    (T, K), N = x.shape, len(weight)
    tile = tiles(weight.dtype).decoder(T)
    _project[(triton.cdiv(T, tile.rows), triton.cdiv(N, tile.columns))](
        x, weight, out, T, N, eps, K=K, NORM=norm, ADD=add, BM=tile.rows, BN=tile.columns, BK=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["pages"])
def _attend_pages(
    q_ptr, keys_ptr, values_ptr, tables_ptr, slots_ptr, positions_ptr, out_ptr, parts_ptr, pages, scale,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """One token's queries of one key head, over one of SPLITS parts of its sequence."""
    t, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = H // KV
    of_group = tl.arange(0, HEADS)
    lane = tl.arange(0, D)
    at = tl.arange(0, BLOCK)
    heads = kv * GROUP + of_group
    mask = (of_group < GROUP)[:, None]
    q = tl.load(q_ptr + (t * H + heads)[:, None] * D + lane[None, :], mask=mask, other=0.0)
    q = (q * scale).to(keys_ptr.dtype.element_ty)
    length = tl.load(positions_ptr + t).to(tl.int32) + 1
    table = tables_ptr + tl.load(slots_ptr + t) * pages
    blocks = tl.cdiv(length, BLOCK)
    of_part = tl.cdiv(blocks, SPLITS)
    best = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, D), tl.float32)
    for block in range(split * of_part, tl.minimum((split + 1) * of_part, blocks)):
        start = block * BLOCK
        page = tl.load(table + start // PAGE)
        offsets = ((page * KV + kv) * PAGE + start % PAGE + at)[:, None] * D + lane[None, :]
        own = start + at < length  # beyond, a page may hold another sequence's rest, which may not be finite
        k = tl.load(keys_ptr + offsets, mask=own[:, None], other=0.0)
        v = tl.load(values_ptr + offsets, mask=own[:, None], other=0.0)
        scores = tl.where(own[None, :], tl.dot(q, tl.trans(k), input_precision="ieee"), float("-inf"))
        largest = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - largest[:, None])
        shrink = tl.exp2(best - largest)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        best = largest
    if SPLITS == 1:
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (t * H + heads)[:, None] * D + lane[None, :], out, mask=mask)
    else:  # a part without tokens has a total of 0 and a best of minus infinity
        part = parts_ptr + ((t * H + heads) * SPLITS + split) * (D + 2)
        tl.store(part[:, None] + lane[None, :], acc, mask=mask)
        tl.store(part + D, best, mask=of_group < GROUP)
        tl.store(part + D + 1, total, mask=of_group < GROUP)


@triton.jit
def _join_parts(parts_ptr, out_ptr, D: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, D)
    parts = parts_ptr + (row * SPLITS + tl.arange(0, SPLITS)) * (D + 2)
    best = tl.load(parts + D)
    weights = tl.exp2(best - tl.max(best, 0))
    total = tl.sum(weights * tl.load(parts + D + 1), 0)
    joined = tl.sum(weights[:, None] * tl.load(parts[:, None] + lane[None, :]), 0) / total
    tl.store(out_ptr + row * D + lane, joined.to(out_ptr.dtype.element_ty))


def attend_pages(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:  # fmt: skip
    """Queries (T, H, D) -> (T, H * D): attention to the own sequence up to the token's position.

    The other arguments are those of `project_heads`. Few tokens' sequences are split over more programs.
    """
    (T, H, D), (_, KV, PAGE, _) = q.shape, keys.shape
    splits = max(1, min(MOST_SPLITS, triton.next_power_of_2(PROGRAMS // (T * KV) + 1) // 2))
    out = torch.empty(T, H * D, dtype=q.dtype, device=q.device)
    parts = torch.empty(T * H * splits if splits > 1 else 0, D + 2, dtype=torch.float32, device=q.device)
    span = tiles(q.dtype).paged_few
    _attend_pages[(T, KV, splits)](
        q, keys, values, tables, slots, positions, out, parts, tables.shape[1], D**-0.5 * LOG2_E,
        H=H, KV=KV, D=D, PAGE=PAGE, BLOCK=min(span.keys, PAGE), SPLITS=splits,
        HEADS=max(span.queries, triton.next_power_of_2(H // KV)), num_warps=span.warps, num_stages=span.stages,
    )  # fmt: skip
    if splits > 1:
        _join_parts[(T * H,)](parts, out, D=D, SPLITS=splits, num_warps=1)
    return out
