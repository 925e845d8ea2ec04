"""Self-attention whose scores depend on the distance of query and key, without a tensor of scores."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cosyvoice_triton.kernels.attention import LOG2_E, softmax_step
from cosyvoice_triton.kernels.launch import cdiv, early, wait
from cosyvoice_triton.kernels.tiles import tiles


@triton.jit(do_not_specialize=["T", "longest"])
def _attend_relative(
    q_ptr, k_ptr, v_ptr, positions_ptr, biases_ptr, visible_ptr, out_ptr, T, longest, scale,
    H: tl.constexpr, D: tl.constexpr, RATIO: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with BLOCK queries of one head to blocks of as many keys.

    The distances of such a pair of blocks are 2 BLOCK - 1 rows of the positions, each product with which is a score by
    distance. Query r has the score of key c in column c - r + BLOCK - 1.
    """
    wait(PDL)
    row, head = tl.program_id(1) // H, tl.program_id(1) % H
    first = tl.program_id(0) * BLOCK
    within = tl.arange(0, BLOCK)
    at = first + within
    lane = tl.arange(0, D)
    ends = tl.load(visible_ptr + row * (T // RATIO) + at // RATIO, mask=at < T, other=0).to(tl.int32) * RATIO
    most = tl.max(ends, 0)
    own = ((row * H + head) * T).to(tl.int64) * D
    q = tl.load(q_ptr + own + at[:, None] * D + lane[None, :], mask=(at < T)[:, None], other=0.0).to(tl.float32)
    of_content = tl.load(biases_ptr + head * D + lane).to(tl.float32)
    of_distance = tl.load(biases_ptr + (H + head) * D + lane).to(tl.float32)
    to_content = ((q + of_content[None, :]) * scale).to(k_ptr.dtype.element_ty)
    to_distance = ((q + of_distance[None, :]) * scale).to(k_ptr.dtype.element_ty)
    column = within[None, :] - within[:, None] + BLOCK - 1
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, D), tl.float32)
    for start in range(0, most, BLOCK):
        key = start + within
        stored = (key < most)[:, None]
        k = tl.load(k_ptr + own + key[:, None] * D + lane[None, :], mask=stored, other=0.0)
        place = longest - first + start - BLOCK + tl.arange(0, 2 * BLOCK)
        known = (place >= 0) & (place < 2 * longest - 1)
        positions = positions_ptr + (place[:, None] * H + head) * D + lane[None, :]
        p = tl.load(positions, mask=known[:, None], other=0.0)
        by_distance = tl.dot(to_distance, tl.trans(p), input_precision="ieee")  # (BLOCK, 2 BLOCK)
        scores = tl.dot(to_content, tl.trans(k), input_precision="ieee") + tl.gather(by_distance, column, 1)
        scores = tl.where(key[None, :] < ends[:, None], scores, float("-inf"))
        v = tl.load(v_ptr + own + key[:, None] * D + lane[None, :], mask=stored, other=0.0)
        best, total, acc = softmax_step(scores, v, best, total, acc)
    places = out_ptr + (row * T + at[:, None]).to(tl.int64) * (H * D) + head * D + lane[None, :]
    tl.store(places, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=(at < T)[:, None])


def attend_relative(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, biases: Tensor, visible: Tensor, ratio: int = 1
) -> Tensor:
    """Compute Transformer-XL's attention: q, k, v (B, H, T, D) contiguous -> (B, T, H * D).

    positions (2 L - 1, H, D), L >= T: projections of the distances query - key, from L - 1 down to 1 - L. biases
    (2, H, D): added to the queries where they meet keys, and distances. visible (B, T / ratio) int64: how many keys,
    counted from the first and in units of `ratio`, the queries of each such unit attend to, at least 1.
    """
    B, H, T, D = q.shape
    out = torch.empty(B, T, H * D, device=q.device, dtype=q.dtype)
    tile = tiles(q.dtype).relative
    _attend_relative[(cdiv(T, tile.queries), B * H)](
        q, k, v, positions, biases, visible, out, T, (len(positions) + 1) // 2, D**-0.5 * LOG2_E,
        H=H, D=D, RATIO=ratio, BLOCK=tile.queries, num_warps=tile.warps, num_stages=tile.stages, **early(),
    )  # fmt: skip
    return out
