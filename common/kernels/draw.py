"""Drawing the next tokens of a batch, one row in one program.

The thresholds of top-k and top-p are found by halving the range of numbers, bit by bit, instead of sorting: a program
holds its row in registers, and counts or sums what is at or above a number.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.launch import early, wait

WARPS = 8


@triton.jit
def _mixed(bits):
    """The hash of `batch_sampler`: Wellons' "hash prospector", in 32 bits."""
    bits = (bits ^ (bits >> 16)) * 0x21F0AAAD
    bits = (bits ^ (bits >> 15)) * 0x735A2D97
    return bits ^ (bits >> 15)


@triton.jit
def _uniform(key, position, draw):
    """A number in [0, 1), float64."""
    counter = _mixed((key + 0x9E3779B9).to(tl.uint32)) + (2 * position + draw).to(tl.uint32)
    return _mixed(counter).to(tl.float64) / 4294967296.0


@triton.jit
def _ordered(scores):
    """float32 as unsigned integers of the same order."""
    bits = scores.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _reached(order, amounts, needed):
    """The largest number such that the amounts at or above it sum up to `needed`; 0 if they never do."""
    found = tl.zeros((), tl.uint32)
    bit = tl.full((), 0x80000000, tl.uint32)
    for _ in range(32):
        candidate = found | bit
        if tl.sum(tl.where(order >= candidate, amounts, 0.0), 0) >= needed:
            found = candidate
        bit = bit >> 1
    return found


@triton.jit
def _picked(weights, uniform, C):
    """The first column at which the sum of the weights (BLOCK,) exceeds the uniform share of it."""
    cumulative = tl.cumsum(weights.to(tl.float64), 0)
    share = uniform * tl.max(cumulative, 0)
    return tl.minimum(tl.sum((cumulative <= share).to(tl.int32), 0), C - 1)


@triton.jit
def _draw(
    logits_ptr, bias_ptr, seen_ptr, recent_ptr, ends_ptr, slots_ptr, positions_ptr, keys_ptr, sampling_ptr, out_ptr, C,
    RECENT: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0)
    slot, position = tl.load(slots_ptr + row), tl.load(positions_ptr + row)
    sampling = sampling_ptr + row * 7  # fields of `SamplingRow`
    column = tl.arange(0, BLOCK)
    inside = column < C
    recent = recent_ptr + slot * RECENT
    last = tl.load(recent + (position + RECENT - 1) % RECENT)
    seen = (tl.load(seen_ptr + slot * C + column, mask=inside, other=0) != 0) | (column == last)
    if last >= 0:
        tl.store(seen_ptr + slot * C + last, 1)
    scores = tl.load(logits_ptr + row * C + column, mask=inside, other=0.0) + tl.load(bias_ptr + column, mask=inside)
    penalty = tl.load(sampling + 1)
    scores = tl.where(seen, tl.where(scores > 0, scores / penalty, scores * penalty), scores) / tl.load(sampling)
    early = (position < tl.load(sampling + 4).to(tl.int64)).to(tl.int1)
    excluded = (tl.load(ends_ptr + slot * C + column, mask=inside, other=0) != 0) & early
    scores = tl.where(inside & (excluded == 0), scores, float("-inf"))

    highest = tl.max(scores, 0)
    everything = tl.exp(scores - highest)
    order = tl.where(inside, _ordered(scores), 0)
    kept = order >= _reached(order, tl.where(inside, 1.0, 0.0), tl.load(sampling + 2))
    weights = tl.where(kept & inside, everything, 0.0)
    window = tl.load(sampling + 5).to(tl.int64)
    whole = tl.where(window > 0, tl.sum(everything, 0), tl.sum(weights, 0))
    weights = tl.where(order >= _reached(order, weights, tl.load(sampling + 3) * whole), weights, 0.0)
    key = tl.load(keys_ptr + row)
    uniform = tl.where(tl.load(sampling + 2) == 1, 0.0, _uniform(key, position, 0))  # the first of equal ones
    drawn = _picked(weights, uniform, C)
    # Repetition-aware sampling: the token is replaced by any other one if the window holds it too often.
    place = tl.arange(0, WINDOW)
    earlier = tl.load(recent + place, mask=place < RECENT, other=-1)
    age = (position + RECENT - 1 - place) % RECENT  # 0: the last token
    repeats = tl.sum(((earlier == drawn) & (age < window) & (place < RECENT)).to(tl.int32), 0)
    if repeats >= tl.load(sampling + 6).to(tl.int32):
        others = tl.where(column == drawn, float("-inf"), scores)
        drawn = _picked(tl.exp(others - tl.max(others, 0)), _uniform(key, position, 1), C)
    tl.store(recent + position % RECENT, drawn.to(tl.int64))
    tl.store(out_ptr + row, drawn.to(tl.int64))


def draw(
    logits: Tensor, bias: Tensor, seen: Tensor, recent: Tensor, ends: Tensor, slots: Tensor, positions: Tensor,
    keys: Tensor, sampling: Tensor,
) -> Tensor:  # fmt: skip
    """Logits (R, C) float32 -> columns (R,), with the results of `batch_sampler.BatchSampler.draw`.

    By slot: seen, ends (slots, C) bool, recent (slots, window); of each row: slots, positions, keys (R,) and sampling
    (R, 7) float32.
    """
    R, C = logits.shape
    out = torch.empty(R, dtype=torch.long, device=logits.device)
    _draw[(R,)](
        logits, bias, seen.view(torch.uint8), recent, ends.view(torch.uint8), slots, positions, keys, sampling, out, C,
        RECENT=recent.shape[1], WINDOW=triton.next_power_of_2(recent.shape[1]), BLOCK=triton.next_power_of_2(C),
        num_warps=WARPS, **early(),
    )  # fmt: skip
    return out
