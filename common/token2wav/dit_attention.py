"""Attention of a batch of chunks over memory that lies apart: a voice's prompt, a stream's ring, the chunk itself.

One fused kernel reads all three where they are; nothing is gathered or concatenated. Needs a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_KEYS = 64


@triton.jit
def _segment(q, keys, values, frames, best, total, acc, D: tl.constexpr, BLOCK: tl.constexpr):
    """Online softmax of queries (Q, D), already scaled for exp2, over `frames` keys and values (frames, D)."""
    at = tl.arange(0, BLOCK)
    lane = tl.arange(0, D)
    for start in range(0, frames, BLOCK):
        inside = start + at < frames
        offsets = (start + at)[:, None] * D + lane[None, :]
        k = tl.load(keys + offsets, mask=inside[:, None], other=0.0)
        scores = tl.where(inside[None, :], tl.dot(q, tl.trans(k)), float("-inf"))
        largest = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - largest[:, None])
        shrink = tl.exp2(best - largest)
        v = tl.load(values + offsets, mask=inside[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        total = total * shrink + tl.sum(weights, 1)
        best = largest
    return best, total, acc


@triton.jit(do_not_specialize=["B", "T", "plane"])
def _attend(
    q_ptr, q_row, q_head, q_frame, k_ptr, v_ptr, out_ptr, table_ptr, ring_keys, ring_values,
    B, T, plane, planes, scale,
    H: tl.constexpr, D: tl.constexpr, RING: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """plane: step * depth + layer; table (6, B) int64: prompt keys, prompt values, prompt, slot, ring, own frames."""
    row, head = tl.program_id(1) // H, tl.program_id(1) % H
    stream, guidance = row % B, row // B
    at = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    lane = tl.arange(0, D)
    q_offsets = row * q_row + head * q_head + at[:, None] * q_frame + lane[None, :]
    q = tl.load(q_ptr + q_offsets, mask=(at < T)[:, None], other=0.0)
    q = (q * scale).to(k_ptr.dtype.element_ty)
    best = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, D), tl.float32)
    of_plane = (plane * 2 + guidance) * H + head

    own = tl.load(table_ptr + 5 * B + stream).to(tl.int32)
    chunk = ((row * H + head) * T).to(tl.int64) * D
    best, total, acc = _segment(q, k_ptr + chunk, v_ptr + chunk, own, best, total, acc, D, BLOCK_K)

    prompt = tl.load(table_ptr + 2 * B + stream)
    start = of_plane * prompt * D
    keys = tl.load(table_ptr + stream).to(k_ptr.dtype) + start
    values = tl.load(table_ptr + B + stream).to(k_ptr.dtype) + start
    best, total, acc = _segment(q, keys, values, prompt.to(tl.int32), best, total, acc, D, BLOCK_K)

    slot = tl.load(table_ptr + 3 * B + stream)
    ring = tl.load(table_ptr + 4 * B + stream).to(tl.int32)
    start = (slot * planes * 2 * H + of_plane) * RING * D
    best, total, acc = _segment(q, ring_keys + start, ring_values + start, ring, best, total, acc, D, BLOCK_K)

    out_offsets = (row * T + at[:, None]) * (H * D) + head * D + lane[None, :]
    tl.store(out_ptr + out_offsets, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=(at < T)[:, None])


def attend(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, ring_keys: Tensor, ring_values: Tensor, plane: int
) -> Tensor:
    """q, k, v (R, H, T, D), k and v contiguous; table (6, B) int64; rings (slots, steps, depth, 2, H, ring, D).

    Returns (R, T, H * D). Rows of the table: addresses of the prompt's keys and values (steps, depth, 2, H, P, D), P,
    slot, frames written in its ring, frames of the chunk that count (at least one).
    """
    R, H, T, D = q.shape
    steps, depth = ring_keys.shape[1:3]
    out = torch.empty(R, T, H * D, device=q.device, dtype=k.dtype)
    block_q = 32 if T <= 32 else 64
    _attend[(triton.cdiv(T, block_q), R * H)](
        q, q.stride(0), q.stride(1), q.stride(2), k, v, out, table, ring_keys, ring_values,
        R // 2, T, plane, steps * depth, D**-0.5 * 1.4426950408889634,
        H=H, D=D, RING=ring_keys.shape[-2], BLOCK_Q=block_q, BLOCK_K=BLOCK_KEYS,
    )  # fmt: skip
    return out
