"""Batch and graph sizes cover what the hops can make, and stay within streams and memory."""

from itertools import product
from typing import get_args
from unittest.mock import Mock

import pytest
from cosyvoice_triton import stacks
from cosyvoice_triton.config import ChunkStrategy
from cosyvoice_triton.constants import (
    CONTEXT_TOKENS,
    LOOKAHEAD_TOKENS,
    MAX_PROMPT_TOKENS,
    ONSET_TOKENS,
    TOKEN_MEL_RATIO,
)
from cosyvoice_triton.orchestrator.chunking import HopRules
from cosyvoice_triton.profiles import LimitNumbers, Profile, SchedulerNumbers
from cosyvoice_triton.token2wav.gpu.limits import (
    COSYVOICE3_FRAMES,
    DIT_FRAMES,
    ENCODER_TOKENS,
    HIFT_FRAMES,
    PREFILL_FRAMES,
    UNET_FRAMES,
    BatchLimits,
    padding,
)
from cosyvoice_triton.token2wav.policy.scheduler import CHUNK_WORKER, FIRST_CHUNK_WORKER
from cosyvoice_triton.token2wav.vocoder.base import GraphedRenderer


def limits_of(stack: str, **values: int) -> BatchLimits:
    return BatchLimits(chunk_boundary=stacks.named(stack).chunk_boundary, **values)


# Of every function that a stack may have graphs of: their lengths, and the most of a batch.
FUNCTIONS = {
    "encoder": ("window_tokens", ENCODER_TOKENS),
    "unet": ("window_frames", UNET_FRAMES),
    "cosyvoice3": ("row_frames", COSYVOICE3_FRAMES),
    "dit": ("row_frames", DIT_FRAMES),
    "prompts": ("prompt_frames", PREFILL_FRAMES),
}


def graph_sizes(limits: BatchLimits) -> dict[str, list[tuple[int, ...]]]:
    sizes = {name: limits.sizes(getattr(limits, lengths), most) for name, (lengths, most) in FUNCTIONS.items()}
    made = GraphedRenderer(Mock(), limits, make=lambda *of, worker: of[2])._graphs
    return sizes | {f"vocoder, begun {begun}": of for begun, of in made.items()}


def lengths(prompt: int, offset: int, new: int, boundary: int) -> dict[str, int]:
    """What those graphs must hold for a chunk, and for the prompt of a first one."""
    window, frames = prompt + min(offset, CONTEXT_TOKENS) + new, TOKEN_MEL_RATIO * new
    # After a prompt, a flow with boundaries computes tokens of it that are not kept, and the look-ahead.
    anew = TOKEN_MEL_RATIO * ((prompt + offset) % boundary + LOOKAHEAD_TOKENS) if boundary > 1 else 0
    needed = {"encoder": window, "unet": TOKEN_MEL_RATIO * window, "dit": frames, "cosyvoice3": frames + anew}
    needed[f"vocoder, begun {offset > 0}"] = frames
    return needed if offset else {**needed, "prompts": TOKEN_MEL_RATIO * prompt}


@pytest.mark.parametrize("first_hop", [5, 15, 30, 100])
def test_graphs_for_starts_take_an_eighth_of_the_others_or_hold_one_chunk(first_hop):
    """Their memory is needed beside that of the others."""
    starts = BatchLimits(first_hop_tokens=first_hop).of_worker(FIRST_CHUNK_WORKER)
    for function, sizes in graph_sizes(starts).items():
        longest = max(T for _, T in sizes)
        most = FUNCTIONS[function][1] if function in FUNCTIONS else HIFT_FRAMES
        assert max(B * T for B, T in sizes) <= max(longest, most // 8), function


@pytest.mark.parametrize("strategy", get_args(ChunkStrategy))
@pytest.mark.parametrize("stack", stacks.names())
@pytest.mark.parametrize(("first_hop", "max_hop"), [(15, 100), (5, 50), (30, 200), (15, 25)])
def test_both_lanes_have_graphs_for_every_chunk_that_the_schedule_can_make(stack, first_hop, max_hop, strategy):
    """First chunks of a text for the one; all chunks of all of its segments for the other, in voices of any length."""
    limits = limits_of(stack, first_hop_tokens=first_hop, max_hop_tokens=max_hop)
    longest = [{name: max(T for B, T in sizes if B == 1) for name, sizes in graph_sizes(of).items()}
               for of in limits.of_each_worker]  # fmt: skip
    rules = HopRules(strategy=strategy, first_hop=first_hop, max_hop=max_hop, boundary=limits.chunk_boundary)
    firsts, seconds = (1, first_hop + 2, 3 * first_hop, 900), (*range(1, 40), *range(40, 260, 7))
    for prompt, silent, *ends in product((0, 3, 26, MAX_PROMPT_TOKENS), (0, ONSET_TOKENS), firsts, seconds):
        schedule = rules.schedule(prompt, lambda: 0.0, silent=silent)
        for segment, tokens in enumerate(ends):
            while (hop := schedule.next_hop(tokens, ended=True)) is not None:
                needed = lengths(prompt, hop.offset, hop.length, limits.chunk_boundary)
                starts = hop.offset == 0 and hop.length <= limits.first_chunk_tokens
                assert starts or segment or hop.offset
                for worker in (CHUNK_WORKER, FIRST_CHUNK_WORKER) if starts else (CHUNK_WORKER,):
                    assert all(frames <= longest[worker][name] for name, frames in needed.items()), (hop, needed)
            schedule.begin_segment()


def test_a_first_chunk_is_at_most_the_longest_first_hop_and_what_the_final_one_adds():
    limits = BatchLimits(first_hop_tokens=15, chunk_boundary=25)
    assert limits.first_chunk_tokens == 39 + ONSET_TOKENS + LOOKAHEAD_TOKENS - 1
    assert limits.of_worker(FIRST_CHUNK_WORKER).first_chunk_tokens == limits.first_chunk_tokens


def test_a_batch_is_as_large_as_the_profile_says():
    numbers = Profile(scheduler=SchedulerNumbers(first_chunk_batch=3), limits=LimitNumbers(max_batch=5))
    limits = BatchLimits(profile=numbers)
    assert [of.max_chunks for of in limits.of_each_worker] == [5, 3]
    assert limits.sizes((32,), 1 << 20) == [(batch, 32) for batch in (1, 2, 4, 5)]


@pytest.mark.parametrize(
    ("max_streams", "batches"), [(1, (1,)), (3, (1, 2, 3)), (32, (1, 2, 4, 8, 16, 24, 32)), (400, 8)]
)
def test_graphs_are_made_for_batches_that_the_streams_can_fill(max_streams, batches):
    made = {B for B, _ in BatchLimits(max_streams=max_streams).sizes((32,), 1 << 20)}
    assert made == set(batches) if isinstance(batches, tuple) else len(made) == batches


def test_a_hop_beyond_a_batch_is_refused_with_both_values():
    with pytest.raises(ValueError, match="max_hop_tokens 2100 makes chunks of 4208 mel frames; a batch holds 4096"):
        BatchLimits(max_hop_tokens=2100)


def test_a_batch_beyond_the_graphs_is_counted_as_its_two_halves():
    padded = padding([(32, 128), (24, 128), (8, 128), (64, 64)])
    assert [padded(chunks, 60) for chunks in (24, 32, 33, 34)] == [24 * 64, 32 * 64, 2 * 24 * 64, 2 * 24 * 64]
    assert padded(64, 30) == 64 * 32 and padded(130, 30) == 4 * 64 * 32  # 65 chunks are again two halves
    assert padded(3, 65) == 3 * 65  # longer than every graph: without padding
    assert padding([])(34, 60) == 34 * 60
