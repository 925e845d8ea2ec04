"""Attention of a decoder's tokens over keys and values in pages."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cosyvoice_triton.kernels.attention import LOG2_E
from cosyvoice_triton.kernels.launch import early, next_power_of_2, wait
from cosyvoice_triton.kernels.tiles import tiles

MOST_SPLITS = 16  # of a sequence: the parts' results are joined by one more launch, in one block
LEAST = tl.constexpr(-1e30)  # below every score
PROGRAMS = 256  # that a GPU runs at the same time


@triton.jit(do_not_specialize=["pages"])
def _attend_pages(
    q_ptr, keys_ptr, values_ptr, tables_ptr, slots_ptr, positions_ptr, out_ptr, parts_ptr, pages, scale,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with the queries of TOKENS tokens of one sequence and one key head to one of SPLITS parts of the sequence.

    Row r of a tile is head r % HEADS of the group, of token r // HEADS.
    """
    first, kv, split = tl.program_id(0) * TOKENS, tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = H // KV
    row = tl.arange(0, TOKENS * HEADS)
    lane = tl.arange(0, D)
    at = tl.arange(0, BLOCK)
    of_group = row % HEADS
    token = first + row // HEADS
    query = token * H + kv * GROUP + of_group
    mask = (of_group < GROUP)[:, None]
    wait(PDL)
    q = tl.load(q_ptr + query[:, None] * D + lane[None, :], mask=mask, other=0.0)
    q = (q * scale).to(keys_ptr.dtype.element_ty)
    length = tl.load(positions_ptr + token).to(tl.int32) + 1
    longest = tl.max(length, 0)
    table = tables_ptr + tl.load(slots_ptr + first) * pages
    blocks = tl.cdiv(longest, BLOCK)
    of_part = tl.cdiv(blocks, SPLITS)
    best = tl.full((TOKENS * HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((TOKENS * HEADS,), tl.float32)
    acc = tl.zeros((TOKENS * HEADS, D), tl.float32)
    for block in range(split * of_part, tl.minimum((split + 1) * of_part, blocks)):
        start = block * BLOCK
        page = tl.load(table + start // PAGE)
        offsets = ((page * KV + kv) * PAGE + start % PAGE + at)[:, None] * D + lane[None, :]
        stored = (start + at < longest)[
            :, None
        ]  # beyond, a page may hold another sequence's rest, which may not be finite
        k = tl.load(keys_ptr + offsets, mask=stored, other=0.0)
        v = tl.load(values_ptr + offsets, mask=stored, other=0.0)
        own = (start + at)[None, :] < length[:, None]
        scores = tl.where(own, tl.dot(q, tl.trans(k), input_precision="ieee"), float("-inf"))
        largest = tl.maximum(best, tl.max(scores, 1))
        largest = tl.maximum(largest, LEAST)  # a token may have nothing in this block, where others of its run have
        weights = tl.exp2(scores - largest[:, None])
        shrink = tl.exp2(best - largest)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        best = largest
    if SPLITS == 1:
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + query[:, None] * D + lane[None, :], out, mask=mask)
    else:  # a part without tokens has a total of 0 and a best of minus infinity
        part = parts_ptr + (query * SPLITS + split) * (D + 2)
        tl.store(part[:, None] + lane[None, :], acc, mask=mask)
        tl.store(part + D, best, mask=of_group < GROUP)
        tl.store(part + D + 1, total, mask=of_group < GROUP)


@triton.jit
def _join_parts(parts_ptr, out_ptr, D: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr):
    wait(PDL)
    row = tl.program_id(0)
    lane = tl.arange(0, D)
    parts = parts_ptr + (row * SPLITS + tl.arange(0, SPLITS)) * (D + 2)
    best = tl.load(parts + D)
    weights = tl.exp2(best - tl.max(best, 0))
    total = tl.sum(weights * tl.load(parts + D + 1), 0)
    joined = tl.sum(weights[:, None] * tl.load(parts[:, None] + lane[None, :]), 0) / total
    tl.store(out_ptr + row * D + lane, joined.to(out_ptr.dtype.element_ty))


def attend_pages(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, slots: Tensor, positions: Tensor, consecutive: int
) -> Tensor:  # fmt: skip
    """Attend with queries (T, H, D) to the token's own sequence, up to its position -> (T, H * D).

    Each `consecutive` tokens belong to one sequence. The other arguments are those of `project_heads`. Few tokens'
    sequences are split over more programs.
    """
    (T, H, D), (_, KV, PAGE, _) = q.shape, keys.shape
    runs, group = T // consecutive, next_power_of_2(H // KV)
    splits = max(1, min(MOST_SPLITS, next_power_of_2(PROGRAMS // (runs * KV) + 1) // 2))
    out = torch.empty(T, H * D, dtype=q.dtype, device=q.device)
    parts = torch.empty(T * H * splits if splits > 1 else 0, D + 2, dtype=torch.float32, device=q.device)
    span = tiles(q.dtype).paged_few if consecutive == 1 else tiles(q.dtype).queries
    _attend_pages[(runs, KV, splits)](
        q, keys, values, tables, slots, positions, out, parts, tables.shape[1], D**-0.5 * LOG2_E,
        H=H, KV=KV, D=D, PAGE=PAGE, BLOCK=min(span.keys, PAGE), SPLITS=splits,
        TOKENS=consecutive, HEADS=max(span.queries // consecutive, group),
        num_warps=span.warps, num_stages=span.stages, **early(),
    )  # fmt: skip
    if splits > 1:
        _join_parts[(T * H,)](parts, out, D=D, SPLITS=splits, num_warps=1, **early())
    return out
