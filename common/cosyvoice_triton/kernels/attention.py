"""Attention over keys and values where they are stored, and storing a stream's newest ones there."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cosyvoice_triton.kernels.launch import cdiv, early, wait
from cosyvoice_triton.kernels.tiles import tiles

LOG2_E = 1.4426950408889634
ALIGNED = tl.constexpr(16)  # bytes, to which torch aligns every tensor
WORD = tl.constexpr(4)  # bytes of the scale of a row in 8 bits, to which it aligns the rows
LEAST = tl.constexpr(1.17549435e-38)  # a row of zeros is not divided by zero


@triton.jit
def _address(place, dtype: tl.constexpr):
    """Load a pointer from a table of addresses. Without the hint the compiler would load and store single numbers."""
    return tl.multiple_of(tl.load(place).to(dtype), ALIGNED)


@triton.jit
def softmax_step(scores, v, best, total, acc):
    """Take one step of the online softmax: highest scores and sums (Q,) and weighted values (Q, D) so far, and `scores`
    (Q, K), to the base of 2, of further values v (K, D) -> highest scores, sums and weighted values of all."""
    largest = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - largest[:, None])
    shrink = tl.exp2(best - largest)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return largest, total * shrink + tl.sum(weights, 1), acc


@triton.jit
def _load_rows(rows, key, frames, dtype: tl.constexpr, D: tl.constexpr, INT8: tl.constexpr):
    """Load keys or values (K, D) of the frames `key`, in 8 bits (see `token2wav.gpu.quantization`) or as they are."""
    lane, there = tl.arange(0, D)[None, :], key < frames
    if INT8:
        row = rows + key * (D + WORD)
        scale = tl.load((row + D).to(tl.pointer_type(tl.float32)), mask=there, other=0.0)
        levels = tl.load(row[:, None] + lane, mask=there[:, None], other=0)
        x = (levels.to(tl.float32) * scale[:, None]).to(dtype)
    else:
        # In brackets, so that keys and values share the offsets, of 32 bits.
        x = tl.load(rows + (key[:, None] * D + lane), mask=there[:, None], other=0.0)
    return x


@triton.jit
def _attend_block(
    q, keys, values, key, frames, ends, best, total, acc, D: tl.constexpr, INT8: tl.constexpr
):  # fmt: skip
    """Take a step of the online softmax with the frames `key`, of which there are those before `frames`, and a query
    attends to those before its `ends`."""
    scores = tl.dot(q, tl.trans(_load_rows(keys, key, frames, q.dtype, D, INT8)), input_precision="ieee")
    scores = tl.where(key[None, :] < ends[:, None], scores, float("-inf"))
    v = _load_rows(values, key, frames, q.dtype, D, INT8)  # not before: both would be in shared memory at once
    return softmax_step(scores, v, best, total, acc)


@triton.jit(do_not_specialize=["B", "T", "plane", "planes"])
def _attend_paged(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, ring_keys, ring_values,
    B, T, plane, planes, scale,
    H: tl.constexpr, D: tl.constexpr, RING: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, INT8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend to the keys of a row, which are in three places.

    One loop goes through all three, so that its pipeline fills once, and through two if these are in 8 bits, which the
    row's own are not. All values of the table are loaded at the beginning, or each would be waited for.
    """
    wait(PDL)
    row, head = tl.program_id(1) // H, tl.program_id(1) % H
    stream, guidance = row % B, row // B
    own = tl.load(table_ptr + 5 * B + stream).to(tl.int32)
    prompt = tl.load(table_ptr + 2 * B + stream)
    slot = tl.load(table_ptr + 3 * B + stream)
    ring = tl.load(table_ptr + 4 * B + stream).to(tl.int32)
    prompt_keys, prompt_values = tl.load(table_ptr + stream), tl.load(table_ptr + B + stream)
    if tl.program_id(0) * BLOCK_Q >= own:
        return  # padding
    at = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    lane = tl.arange(0, D)
    chunk = ((row * H + head) * T).to(tl.int64) * D
    q = tl.load(q_ptr + chunk + at[:, None] * D + lane[None, :], mask=(at < T)[:, None], other=0.0)
    q = (q * scale).to(k_ptr.dtype.element_ty)
    best = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, D), tl.float32)
    of_plane = (plane * ROWS + guidance) * H + head

    ends = tl.zeros((BLOCK_Q,), tl.int32) + own
    if CHUNK:
        ends = tl.minimum((at // CHUNK + 1) * CHUNK, ends)
    last = tl.max(ends, 0)
    of_prompt = tl.cdiv(last, BLOCK_K)
    of_ring = of_prompt + tl.cdiv(prompt.to(tl.int32), BLOCK_K)
    size: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth // 8
    width: tl.constexpr = D + WORD if INT8 else D * size  # bytes
    aligned: tl.constexpr = WORD if INT8 else ALIGNED
    of_row, before = chunk * size, of_plane * prompt * width
    in_ring = (slot * planes * ROWS * H + of_plane) * (RING * width)
    begin = 0
    if INT8:
        begin = of_prompt
        for block in range(of_prompt):
            key = block * BLOCK_K + tl.arange(0, BLOCK_K)
            best, total, acc = _attend_block(
                q, k_ptr + chunk, v_ptr + chunk, key, last, ends, best, total, acc, D, False
            )  # fmt: skip
    for block in range(begin, of_ring + tl.cdiv(ring, BLOCK_K)):
        own_block, prompt_block = block < of_prompt, block < of_ring
        keys = tl.where(prompt_block, prompt_keys + before, ring_keys.to(tl.int64) + in_ring)
        keys = tl.where(own_block, k_ptr.to(tl.int64) + of_row, keys)
        values = tl.where(prompt_block, prompt_values + before, ring_values.to(tl.int64) + in_ring)
        values = tl.where(own_block, v_ptr.to(tl.int64) + of_row, values)
        keys = tl.multiple_of(keys.to(ring_keys.dtype), aligned)
        values = tl.multiple_of(values.to(ring_keys.dtype), aligned)
        frames = tl.where(own_block, last, tl.where(prompt_block, prompt.to(tl.int32), ring))
        first = tl.where(own_block, 0, tl.where(prompt_block, of_prompt, of_ring))
        key = (block - first) * BLOCK_K + tl.arange(0, BLOCK_K)
        seen = tl.where(own_block, ends, frames)
        best, total, acc = _attend_block(q, keys, values, key, frames, seen, best, total, acc, D, INT8)

    out_offsets = (row * T + at[:, None]) * (H * D) + head * D + lane[None, :]
    tl.store(out_ptr + out_offsets, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=(at < T)[:, None])


def attend_paged(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, ring_keys: Tensor, ring_values: Tensor, plane: int, chunk: int = 0
) -> Tensor:
    """Attend to a voice's prompt, a stream's ring buffer and a row's own frames, without copying them together.

    q, k, v (R, H, T, D) contiguous -> (R, T, H * D). Rows R: B conditional, then perhaps as many unconditional. Rings
    (slots, steps, depth, R / B, H, ring, D), with the prompts in k's type or 8 bits, see `append`; plane: step *
    depth + layer. The table (>= 6, B) int64 has these rows: address of the prompt's keys and of its values (steps,
    depth, R / B, H, P, D), P, slot, number of frames written in the slot's ring, number of valid frames of the row (at
    least one). A query attends to all of its row's own frames or, if `chunk` is not 0, to its own block of so many and
    all before it, as in `attend_blocks`.
    """
    R, H, T, D = q.shape
    steps, depth, rows = ring_keys.shape[1:4]
    out = torch.empty(R, T, H * D, device=q.device, dtype=k.dtype)
    span = tiles(k.dtype).paged(R * T)
    _attend_paged[(cdiv(T, span.queries), R * H)](
        q, k, v, out, table, ring_keys, ring_values, R // rows, T, plane, steps * depth, D**-0.5 * LOG2_E,
        H=H, D=D, RING=ring_keys.shape[-2], CHUNK=chunk, ROWS=rows, BLOCK_Q=span.queries, BLOCK_K=span.keys,
        INT8=ring_keys.dtype == torch.int8, num_warps=span.warps, num_stages=span.stages, **early(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["B", "T"])
def _attend_blocks(
    q_ptr, k_ptr, v_ptr, out_ptr, frames_ptr, B, T, scale,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
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
    keys, values, last = k_ptr + start, v_ptr + start, tl.max(ends, 0)
    for begin in range(0, last, BLOCK_K):
        key = begin + tl.arange(0, BLOCK_K)
        best, total, acc = _attend_block(q, keys, values, key, last, ends, best, total, acc, D, False)
    out_offsets = (row * T + at[:, None]) * (H * D) + head * D + lane[None, :]
    tl.store(out_ptr + out_offsets, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=(at < T)[:, None])


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, frames: Tensor, chunk: int) -> Tensor:
    """Attend to the query's own block of `chunk` frames and all before it: q, k, v (R, H, T, D) -> (R, T, H * D).

    frames (B,): valid frames of each stream, at least one; B divides R, and row r is stream r % B.
    """
    R, H, T, D = q.shape
    out = torch.empty(R, T, H * D, device=q.device, dtype=k.dtype)
    span = tiles(k.dtype).blocks(R * T)
    _attend_blocks[(cdiv(T, span.queries), R * H)](
        q, k, v, out, frames, len(frames), T, D**-0.5 * LOG2_E,
        H=H, D=D, CHUNK=chunk, BLOCK_Q=span.queries, BLOCK_K=span.keys,
        num_warps=span.warps, num_stages=span.stages, **early(),
    )  # fmt: skip
    return out


@triton.jit
def _store_rows(place, row, x, mask, D: tl.constexpr, INT8: tl.constexpr):
    """Store keys or values x (K, D) as rows of what a table's address names: in 8 bits or as they are."""
    lane = tl.arange(0, D)[None, :]
    if INT8:
        rows = tl.multiple_of(tl.load(place).to(tl.pointer_type(tl.int8)), ALIGNED) + row * (D + WORD)
        x = x.to(tl.float32)
        # The largest of numbers leaves out those that are none; the sum keeps them.
        scale = tl.max(tl.abs(x), 1) / 127 + tl.sum(x * 0, 1)
        levels = tl.floor(x / tl.maximum(scale, LEAST)[:, None] + 0.5)
        tl.store(rows[:, None] + lane, levels.to(tl.int8), mask=mask[:, None])
        tl.store((rows + D).to(tl.pointer_type(tl.float32)), scale, mask=mask)
    else:
        rows = _address(place, tl.pointer_type(x.dtype))
        tl.store(rows + row[:, None] * D + lane, x, mask=mask[:, None])


@triton.jit(do_not_specialize=["B", "T", "step"])
def _append(
    keys_ptr, values_ptr, table_ptr, B, T, H, step,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, INT8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    head, row, layer = tl.program_id(1) % H, tl.program_id(1) // H, tl.program_id(2)
    stream, guidance = row % B, row // B
    place = tl.load(table_ptr + 6 * B + stream)
    length = tl.load(table_ptr + 10 * B + stream)
    kept = tl.load(table_ptr + 11 * B + stream)
    count = tl.minimum(kept, length)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, D)[None, :]
    mask = at < count
    chunk = ((layer * ROWS * B + row).to(tl.int64) * H + head) * T * D
    source = chunk + (kept - count + at)[:, None] * D + lane
    of_plane = (((step * tl.num_programs(2) + layer) * ROWS + guidance) * H + head) * length
    target = of_plane + (place + at) % length
    keys = tl.load(keys_ptr + source, mask=mask[:, None], other=0.0)
    _store_rows(table_ptr + 8 * B + stream, target, keys, mask, D, INT8)
    values = tl.load(values_ptr + source, mask=mask[:, None], other=0.0)
    _store_rows(table_ptr + 9 * B + stream, target, values, mask, D, INT8)


def append(keys: Tensor, values: Tensor, table: Tensor, step: int, *, int8: bool = False) -> None:
    """Store frames of each stream at one step, keys and values (depth, R, H, T, D), in its ring or prompt.

    The table is that of `attend_paged` with further rows: 6 index of a stream's next frame there, 8 and 9 address of
    its keys and of its values (steps, depth, R / B, H, length, D), 10 length, 11 how many frames to store, from the
    row's first on; of more than there is room for, the last ones. int8: a row there
    is D integers of 8 bits and their scale, see `token2wav.gpu.quantization`.
    """
    depth, R, H, T, D = keys.shape
    B = table.shape[1]
    _append[(cdiv(T, 32), R * H, depth)](
        keys, values, table, B, T, H, step, ROWS=R // B, D=D, BLOCK=32, INT8=int8, **early()
    )  # fmt: skip


@triton.jit
def _rotate_pairs(x_ptr, places, cosine, sine, mask):
    even = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(x_ptr + places + 1, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ptr + places, (even * cosine - odd * sine).to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(x_ptr + places + 1, (odd * cosine + even * sine).to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["B", "T"])
def _rotate_first_head(
    q_ptr, k_ptr, rotary_ptr, B, T, H: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (at < T)[:, None]
    within = at[:, None] * HALF + tl.arange(0, HALF)[None, :]
    angles = rotary_ptr + tl.program_id(1) % B * T * HALF + within
    cosine = tl.load(angles, mask=mask, other=0.0)
    sine = tl.load(angles + B * T * HALF, mask=mask, other=0.0)
    places = tl.program_id(1).to(tl.int64) * (2 * H * HALF * T) + 2 * within
    _rotate_pairs(q_ptr, places, cosine, sine, mask)
    _rotate_pairs(k_ptr, places, cosine, sine, mask)


def rotate_first_head(q: Tensor, k: Tensor, rotary: Tensor) -> None:
    """Apply RoPE to head 0: rotate pairs of neighbouring channels by each frame's angles, in place. q, k (R, H, T, D).

    rotary (2, B, T, D / 2) float32: cosine, sine; B divides R, and row r is stream r % B.
    """
    R, H, T, D = q.shape
    _rotate_first_head[(cdiv(T, 32), R)](
        q, k, rotary, rotary.shape[1], T, H=H, HALF=D // 2, BLOCK=32, num_warps=4, **early()
    )  # fmt: skip
