"""The two ends of a decode step, one row of the batch in one program: what the network starts from, and the sampling of
the next token, with the state that it changes.

The thresholds of top-k and top-p are found by halving the range of numbers, bit by bit, instead of sorting: a program
holds its row in registers, and counts or sums what is at or above a number, until a sum is what is needed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cosyvoice_triton.kernels.launch import early, next_power_of_2, wait

WARPS = 8
# Columns of `numbers`: see `Requests` of the engine
LAST, LENGTH, SAMPLED, MOST, SEED = map(tl.constexpr, range(5))


@triton.jit
def _begin(
    batch_ptr, ended_ptr, numbers_ptr, embedding_ptr, slots_ptr, positions_ptr, x_ptr, steps_ptr, copy_ptr, squares_ptr,
    scratch,
    NUMBERS: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row, k = tl.program_id(0), tl.arange(0, WIDE)
    slot = tl.load(batch_ptr + row)
    slot = tl.where(tl.load(ended_ptr + slot) != 0, scratch, slot)
    tl.store(slots_ptr + row, slot)
    numbers = numbers_ptr + slot * NUMBERS
    tl.store(positions_ptr + row, tl.load(numbers + LENGTH))
    x = tl.load(embedding_ptr + tl.load(numbers + LAST) * K + k, mask=k < K, other=0.0)
    tl.store(x_ptr + row * K + k, x.to(tl.float32), mask=k < K)
    if copy_ptr is not None:
        tl.store(copy_ptr + row * K + k, x, mask=k < K)
        tl.store(squares_ptr + row, tl.sum(x.to(tl.float32) * x.to(tl.float32), 0))
    if row == 0:
        tl.store(steps_ptr, tl.load(steps_ptr) + 1)


def begin(
    batch: Tensor, ended: Tensor, numbers: Tensor, steps: Tensor, embedding: Tensor, *, cast: bool = False
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Begin a decode step of a batch of slots (R,).

    Returns the slots, with the last slot in place of those that have ended; the position of each one's last token; its
    embedding (R, K) float32; and, if `cast`, the embedding in its own type, with the sum (R, 1) of its squares.
    By slot: ended bool, numbers (slots, 5). steps (1,) += 1.
    """
    (R,), K = batch.shape, embedding.shape[1]
    slots, positions = torch.empty(2, R, dtype=torch.long, device=batch.device)
    x = torch.empty(R, K, dtype=torch.float32, device=batch.device)
    rounded = (torch.empty_like(x, dtype=embedding.dtype), x.new_empty(R, 1)) if cast else None
    _begin[(R,)](
        batch, ended.view(torch.uint8), numbers, embedding, slots, positions, x, steps, *(rounded or (None, None)),
        len(ended) - 1, NUMBERS=numbers.shape[1], K=K, WIDE=next_power_of_2(K), num_warps=4, **early(),
    )  # fmt: skip
    return slots, positions, x, rounded


@triton.jit
def _mixed(bits):
    """Hash 32 bits as `llm.sampler` does: Wellons' "hash prospector"."""
    bits = (bits ^ (bits >> 16)) * 0x21F0AAAD
    bits = (bits ^ (bits >> 15)) * 0x735A2D97
    return bits ^ (bits >> 15)


@triton.jit
def _uniform(key, position, attempt):
    """Return a random number in [0, 1), float64."""
    counter = _mixed((key + 0x9E3779B9).to(tl.uint32)) + (2 * position + attempt).to(tl.uint32)
    return _mixed(counter).to(tl.float64) / 4294967296.0


@triton.jit
def _ordered(scores):
    """Map float32 to unsigned integers of the same order."""
    bits = scores.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _reached(order, amounts, needed, least, most):
    """Find a number such that the amounts at or above it sum up to `needed`, and none of them can be left out; all that
    are not 0 are above it if they never do. The ones that are not 0 are of numbers from `least` to `most`."""
    bit = tl.full((), 0x80000000, tl.uint32)
    while bit > (least ^ most):  # both have these bits in common
        bit = bit >> 1
    found = most & ~(bit | (bit - (bit > 0).to(tl.uint32)))
    total = tl.full((), float("inf"), tl.float32)
    while (bit > 0) & (total != needed):
        candidate = found | bit
        reached = tl.sum(tl.where(order >= candidate, amounts, 0.0), 0)
        if reached >= needed:
            found = candidate
            total = reached
        bit = bit >> 1
    return found


@triton.jit
def _picked(weights, uniform, C):
    """Find the first column at which the sum of the weights (BLOCK,) exceeds the uniform share of it."""
    cumulative = tl.cumsum(weights.to(tl.float64), 0)
    share = uniform * tl.max(cumulative, 0)
    return tl.minimum(tl.sum((cumulative <= share).to(tl.int32), 0), C - 1)


@triton.jit
def _sample(
    logits_ptr, bias_ptr, seen_ptr, recent_ptr, numbers_ptr, sampling_ptr, ends_ptr, ended_ptr, slots_ptr, steps_ptr,
    ring_ptr, C, first, scratch, rows, nothing, fault,
    NUMBERS: tl.constexpr, FIELDS: tl.constexpr, RING: tl.constexpr, RECENT: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    numbers = numbers_ptr + slot * NUMBERS
    position = tl.load(numbers + SAMPLED)
    sampling = sampling_ptr + slot * FIELDS  # of `SamplingRow`
    column = tl.arange(0, BLOCK)
    inside = column < C
    recent = recent_ptr + slot * RECENT
    last = tl.load(recent + (position + RECENT - 1) % RECENT)
    seen = (tl.load(seen_ptr + slot * C + column, mask=inside, other=0) != 0) | (column == last)
    if last >= 0:
        tl.store(seen_ptr + slot * C + last, 1)
    scores = tl.load(logits_ptr + row * C + column, mask=inside, other=0.0) + tl.load(bias_ptr + column, mask=inside)
    scores = tl.where(inside, scores, float("-inf"))
    top = tl.max(scores, 0)  # ignores what is not a number
    broken = (tl.sum((scores != scores).to(tl.int32), 0) > 0) | (tl.abs(top) == float("inf"))
    penalty = tl.load(sampling + 1)
    scores = tl.where(seen, tl.where(scores > 0, scores / penalty, scores * penalty), scores) / tl.load(sampling)
    early = (position < tl.load(sampling + 4).to(tl.int64)).to(tl.int1)
    excluded = (tl.load(ends_ptr + slot * C + column, mask=inside, other=0) != 0) & early
    scores = tl.where(inside & (excluded == 0), scores, float("-inf"))

    highest = tl.max(scores, 0)
    everything = tl.exp(scores - highest)
    order = tl.where(inside, _ordered(scores), 0)
    most = tl.max(order, 0)
    least = _reached(order, tl.where(inside, 1.0, 0.0), tl.load(sampling + 2), tl.zeros((), tl.uint32), most)
    kept = order >= least
    weights = tl.where(kept & inside, everything, 0.0)
    window = tl.load(sampling + 5).to(tl.int64)
    whole = tl.where(window > 0, tl.sum(everything, 0), tl.sum(weights, 0))
    least = _reached(order, weights, tl.load(sampling + 3) * whole, least, most)
    weights = tl.where(order >= least, weights, 0.0)
    key = tl.load(numbers + SEED)
    uniform = tl.where(tl.load(sampling + 2) == 1, 0.0, _uniform(key, position, 0))  # the first of equal ones
    sampled = _picked(weights, uniform, C)
    # Repetition-aware sampling: the token is replaced by any other one if the window holds it too often.
    place = tl.arange(0, WINDOW)
    earlier = tl.load(recent + place, mask=place < RECENT, other=-1)
    age = (position + RECENT - 1 - place) % RECENT  # 0: the last token
    repeats = tl.sum(((earlier == sampled) & (age < window) & (place < RECENT)).to(tl.int32), 0)
    if repeats >= tl.load(sampling + 6).to(tl.int32):
        others = tl.where(column == sampled, float("-inf"), scores)
        sampled = _picked(tl.exp(others - tl.max(others, 0)), _uniform(key, position, 1), C)
    tl.store(recent + position % RECENT, sampled.to(tl.int64))

    idle = slot == scratch
    length = tl.load(numbers + LENGTH)
    stops = (tl.load(ends_ptr + slot * C + sampled) != 0) | (position + 1 >= tl.load(numbers + MOST))
    tl.store(numbers + LAST, tl.where(idle, 0, sampled + first))
    tl.store(numbers + LENGTH, tl.where(idle, 0, length + 1))
    tl.store(numbers + SAMPLED, tl.where(idle, 0, position + 1))
    tl.store(ended_ptr + slot, (idle | broken | stops).to(tl.uint8))
    column_or_code = tl.where(idle, nothing, tl.where(broken, fault, sampled))
    tl.store(ring_ptr + (tl.load(steps_ptr) - 1) % RING * rows + row, column_or_code.to(tl.int32))


def sample(
    logits: Tensor, bias: Tensor, seen: Tensor, recent: Tensor, numbers: Tensor, sampling: Tensor, ends: Tensor,
    ended: Tensor, slots: Tensor, steps: Tensor, ring: Tensor, first: int, nothing: int, fault: int,
) -> None:  # fmt: skip
    """Sample from logits (R, C) float32 of requests in these slots (R,), with the results of
    `llm.sampler.BatchSampler`, and bring their state up to date.

    By slot: seen, ends (slots, C) and ended bool, recent (slots, window), numbers (slots, 5), sampling (slots, 7)
    float32. The sampled columns go to row (steps - 1) % len(ring) of the ring buffer `ring` (steps,
    rows): `nothing` for the last slot, `fault` for logits that are not finite.
    """
    R, C = logits.shape
    _sample[(R,)](
        logits, bias, seen.view(torch.uint8), recent, numbers, sampling, ends.view(torch.uint8),
        ended.view(torch.uint8), slots, steps, ring, C, first, len(ended) - 1, ring.shape[1], nothing, fault,
        NUMBERS=numbers.shape[1], FIELDS=sampling.shape[1], RING=len(ring), RECENT=recent.shape[1],
        WINDOW=next_power_of_2(recent.shape[1]), BLOCK=next_power_of_2(C), num_warps=WARPS, **early(),
    )  # fmt: skip
