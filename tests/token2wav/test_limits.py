"""Batch and graph sizes cover what the hops can make, and stay within streams and memory."""

import itertools

import pytest
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import (
    CONTEXT_TOKENS,
    LOOKAHEAD_TOKENS,
    MAX_PROMPT_TOKENS,
    ONSET_TOKENS,
    TOKEN_MEL_RATIO,
)
from cosyvoice_triton.orchestrator.chunking import HopRules
from cosyvoice_triton.profiles import H200, LimitNumbers, Profile, SchedulerNumbers
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
from cosyvoice_triton.token2wav.policy.scheduler import FIRST_CHUNK_WORKER


def limits_of(stack: str, **values: int) -> BatchLimits:
    return BatchLimits(chunk_boundary=stacks.named(stack).chunk_boundary, **values)


# Of every function that a stack may have graphs of: their lengths, and the most of a batch.
FUNCTIONS = {
    "encoder": ("window_tokens", ENCODER_TOKENS),
    "unet": ("window_frames", UNET_FRAMES),
    "cosyvoice3": ("window_frames", COSYVOICE3_FRAMES),
    "dit": ("chunk_frames", DIT_FRAMES),
    "prompts": ("prompt_frames", PREFILL_FRAMES),
    "vocoder": ("chunk_frames", HIFT_FRAMES),
    "vocoder, first": ("first_chunk_frames", HIFT_FRAMES),
}


def graph_sizes(limits: BatchLimits) -> dict[str, list[tuple[int, ...]]]:
    return {name: limits.sizes(getattr(limits, lengths), most) for name, (lengths, most) in FUNCTIONS.items()}


def lengths(prompt: int, context: int, new: int, first: bool) -> dict[str, int]:
    """What those graphs must hold for a chunk, and for the prompt of a first one."""
    window, frames = prompt + context + new, TOKEN_MEL_RATIO * new
    windows = {"encoder": window, "unet": TOKEN_MEL_RATIO * window, "cosyvoice3": TOKEN_MEL_RATIO * window}
    needed = {**windows, "dit": frames, "vocoder": frames}
    return {**needed, "prompts": TOKEN_MEL_RATIO * prompt, "vocoder, first": frames} if first else needed


@pytest.mark.parametrize("first_hop", [5, 15, 30, 100])
def test_graphs_for_starts_take_an_eighth_of_the_others_or_hold_one_chunk(first_hop):
    """Their memory is needed beside that of the others."""
    starts = BatchLimits(first_hop_tokens=first_hop).of_worker(FIRST_CHUNK_WORKER)
    for function, sizes in graph_sizes(starts).items():
        longest = max(T for _, T in sizes)
        assert max(B * T for B, T in sizes) <= max(longest, FUNCTIONS[function][1] // 8), function


@pytest.mark.parametrize("stack", stacks.names())
@pytest.mark.parametrize(("first_hop", "max_hop"), [(15, 100), (5, 50), (30, 200), (15, 25)])
def test_both_lanes_have_graphs_for_all_that_they_are_sent(stack, first_hop, max_hop):
    """First chunks for the one, all chunks for the other, in voices of any length."""
    limits = limits_of(stack, first_hop_tokens=first_hop, max_hop_tokens=max_hop)
    starts, others = graph_sizes(limits.of_worker(FIRST_CHUNK_WORKER)), graph_sizes(limits)
    rules = HopRules(first_hop=first_hop, max_hop=max_hop, boundary=limits.chunk_boundary)
    for prompt, length in itertools.product((0, 3, 26, MAX_PROMPT_TOKENS), (3, first_hop + 2, first_hop + 26, 900)):
        schedule = rules.schedule(prompt)
        while (hop := schedule.next_hop(length, ended=True)) is not None:
            first = hop.offset == 0
            assert not first or hop.length <= limits.first_chunk_tokens
            for function, needed in lengths(prompt, min(hop.offset, CONTEXT_TOKENS), hop.length, first).items():
                for sizes in (starts, others) if first else (others,):
                    assert any(T >= needed for B, T in sizes[function] if B == 1), function


def test_a_first_chunk_is_at_most_the_longest_first_hop_and_what_the_final_one_adds():
    limits = BatchLimits(first_hop_tokens=15, chunk_boundary=25)
    assert limits.first_chunk_tokens == 39 + ONSET_TOKENS + LOOKAHEAD_TOKENS - 1
    assert limits.of_worker(FIRST_CHUNK_WORKER).first_chunk_tokens == limits.first_chunk_tokens


def test_a_batch_is_as_large_as_the_profile_says():
    numbers = Profile(scheduler=SchedulerNumbers(first_chunk_batch=3), limits=LimitNumbers(max_batch=5))
    limits = BatchLimits(profile=numbers)
    assert [of.max_chunks for of in limits.of_each_worker] == [5, 3]
    assert limits.sizes((32,), 1 << 20) == [(batch, 32) for batch in (1, 2, 4, 5)]


def test_the_default_sizes():
    limits = BatchLimits()
    assert limits.chunk_frames == (32, 64, 104, 128, 208)
    assert limits.window_tokens == (160, 208, 256, 320, 416, 512, 768, 1024, 1232)
    assert limits.prompt_frames == (128, 256, 384, 512, 768, 1024, 1504)
    sizes = limits.sizes(limits.chunk_frames, DIT_FRAMES)
    assert {(64, 104), (32, 208)} <= set(sizes) and (64, 128) not in sizes
    assert limits.max_chunks == 64
    starts = limits.of_worker(FIRST_CHUNK_WORKER)
    assert starts.chunk_frames == starts.first_chunk_frames == (32, 40)
    assert starts.window_tokens == (160, 208, 256, 320, 416, 512, 768, 776)
    assert starts.max_chunks == H200.scheduler.first_chunk_batch and starts.prompt_frames == limits.prompt_frames


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
