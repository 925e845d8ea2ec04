"""Attention over keys and values where they are stored, and storing a stream's newest ones in its ring buffer."""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
FEW_QUERIES = 1024  # batches of at most this many queries use small tiles


@triton.jit
def _segment(q, keys, values, ends, frames, best, total, acc, D: tl.constexpr, BLOCK: tl.constexpr):
    """Online softmax of queries (Q, D), already scaled for exp2, over the first `ends` (Q,) of `frames` keys (., D)."""
    at = tl.arange(0, BLOCK)
    lane = tl.arange(0, D)
    for start in range(0, frames, BLOCK):
        offsets = (start + at)[:, None] * D + lane[None, :]
        k = tl.load(keys + offsets, mask=(start + at < frames)[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where((start + at)[None, :] < ends[:, None], scores, float("-inf"))
        largest = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - largest[:, None])
        shrink = tl.exp2(best - largest)
        v = tl.load(values + offsets, mask=(start + at < frames)[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        best = largest
    return best, total, acc


@triton.jit(do_not_specialize=["B", "T", "plane", "planes"])
def _attend_paged(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, ring_keys, ring_values,
    B, T, plane, planes, scale,
    H: tl.constexpr, D: tl.constexpr, RING: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(1) // H, tl.program_id(1) % H
    stream, guidance = row % B, row // B
    at = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    lane = tl.arange(0, D)
    chunk = ((row * H + head) * T).to(tl.int64) * D
    q = tl.load(q_ptr + chunk + at[:, None] * D + lane[None, :], mask=(at < T)[:, None], other=0.0)
    q = (q * scale).to(k_ptr.dtype.element_ty)
    best = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, D), tl.float32)
    of_plane = (plane * 2 + guidance) * H + head
    everything = tl.zeros((BLOCK_Q,), tl.int32)

    own = tl.load(table_ptr + 5 * B + stream).to(tl.int32)
    best, total, acc = _segment(
        q, k_ptr + chunk, v_ptr + chunk, everything + own, own, best, total, acc, D, BLOCK_K
    )  # fmt: skip

    prompt = tl.load(table_ptr + 2 * B + stream)
    start = of_plane * prompt * D
    keys = tl.load(table_ptr + stream).to(k_ptr.dtype) + start
    values = tl.load(table_ptr + B + stream).to(k_ptr.dtype) + start
    frames = prompt.to(tl.int32)
    best, total, acc = _segment(q, keys, values, everything + frames, frames, best, total, acc, D, BLOCK_K)

    slot = tl.load(table_ptr + 3 * B + stream)
    ring = tl.load(table_ptr + 4 * B + stream).to(tl.int32)
    start = (slot * planes * 2 * H + of_plane) * RING * D
    best, total, acc = _segment(
        q, ring_keys + start, ring_values + start, everything + ring, ring, best, total, acc, D, BLOCK_K
    )  # fmt: skip

    out_offsets = (row * T + at[:, None]) * (H * D) + head * D + lane[None, :]
    tl.store(out_ptr + out_offsets, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=(at < T)[:, None])


def attend_paged(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, ring_keys: Tensor, ring_values: Tensor, plane: int
) -> Tensor:
    """Attention over a voice's prompt, a stream's ring buffer and the chunk itself, without copying them together.

    q, k, v (R, H, T, D) contiguous -> (R, T, H * D). Rows R = 2 B: conditional, then unconditional. Rings (slots,
    steps, depth, 2, H, ring, D); plane: step * depth + layer. The table (>= 6, B) int64 has these rows: address of the
    prompt's keys and of its values (steps, depth, 2, H, P, D), P, slot, number of frames written in the slot's ring,
    number of valid frames of the chunk (at least one).
    """
    R, H, T, D = q.shape
    steps, depth = ring_keys.shape[1:3]
    out = torch.empty(R, T, H * D, device=q.device, dtype=k.dtype)
    block_q = 16 if R * T <= FEW_QUERIES // 4 else 64
    _attend_paged[(triton.cdiv(T, block_q), R * H)](
        q, k, v, out, table, ring_keys, ring_values, R // 2, T, plane, steps * depth, D**-0.5 * LOG2_E,
        H=H, D=D, RING=ring_keys.shape[-2], BLOCK_Q=block_q, BLOCK_K=64,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["B", "T"])
def _attend_blocks(
    q_ptr, k_ptr, v_ptr, out_ptr, frames_ptr, B, T, scale,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(1) // H, tl.program_id(1) % H
    at = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    lane = tl.arange(0, D)
    start = ((row * H + head) * T).to(tl.int64) * D
    q = tl.load(q_ptr + start + at[:, None] * D + lane[None, :], mask=(at < T)[:, None], other=0.0)
    q = (q * scale).to(k_ptr.dtype.element_ty)
    frames = tl.load(frames_ptr + row % B).to(tl.int32)
    ends = tl.minimum((at // CHUNK + 1) * CHUNK, frames)
    best = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, D), tl.float32)
    best, total, acc = _segment(
        q, k_ptr + start, v_ptr + start, ends, tl.max(ends, 0), best, total, acc, D, BLOCK_K
    )  # fmt: skip
    out_offsets = (row * T + at[:, None]) * (H * D) + head * D + lane[None, :]
    tl.store(out_ptr + out_offsets, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=(at < T)[:, None])


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, frames: Tensor, chunk: int) -> Tensor:
    """Attention to the query's own block of `chunk` frames and all before it: q, k, v (R, H, T, D) -> (R, T, H * D).

    frames (B,): valid frames of each stream, at least one; B divides R, and row r is stream r % B.
    """
    R, H, T, D = q.shape
    out = torch.empty(R, T, H * D, device=q.device, dtype=k.dtype)
    block_q = 32 if R * T <= FEW_QUERIES else 64
    _attend_blocks[(triton.cdiv(T, block_q), R * H)](
        q, k, v, out, frames, len(frames), T, D**-0.5 * LOG2_E,
        H=H, D=D, CHUNK=chunk, BLOCK_Q=block_q, BLOCK_K=64,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["B", "T"])
def _append(new_ptr, ring_ptr, table_ptr, B, T, planes, H, D: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr):
    head, row, plane = tl.program_id(1) % H, tl.program_id(1) // H, tl.program_id(2)
    stream, guidance = row % B, row // B
    slot = tl.load(table_ptr + 3 * B + stream)
    own = tl.load(table_ptr + 5 * B + stream).to(tl.int32)
    place = tl.load(table_ptr + 6 * B + stream).to(tl.int32)
    count = tl.minimum(own, RING)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, D)
    mask = (at < count)[:, None]
    chunk = ((plane * 2 * B + row).to(tl.int64) * H + head) * T * D
    x = tl.load(new_ptr + chunk + (own - count + at)[:, None] * D + lane[None, :], mask=mask)
    ring = (((slot * planes + plane) * 2 + guidance) * H + head) * RING * D
    tl.store(ring_ptr + ring + ((place + at) % RING)[:, None] * D + lane[None, :], x, mask=mask)


def append(new: Tensor, ring: Tensor, table: Tensor) -> None:
    """Store the newest frames of each stream in its ring: new (steps, depth, R, H, T, D), ring and table as above.

    Row 6 of the table: index in its ring of a stream's next frame.
    """
    steps, depth, R, H, T, D = new.shape
    length = ring.shape[-2]
    _append[(triton.cdiv(min(T, length), 32), R * H, steps * depth)](
        new, ring, table, R // 2, T, steps * depth, H, D=D, RING=length, BLOCK=32
    )
