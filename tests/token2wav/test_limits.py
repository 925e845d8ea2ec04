"""Batch and graph sizes cover what the hops can make, and stay within streams and memory."""

import itertools

import pytest
import torch

from common import stacks
from common.constants import TOKEN_MEL_RATIO
from common.orchestrator.chunking import HopRules
from common.token2wav import graphs as graphs_module
from common.token2wav.graphs import Graphs
from common.token2wav.limits import DIT_FRAMES, BatchLimits


def limits_of(stack: str, **values: int) -> BatchLimits:
    return BatchLimits(chunk_boundary=stacks.named(stack).chunk_boundary, **values)


@pytest.mark.parametrize("stack", stacks.names())
@pytest.mark.parametrize("strategy", ["exponential", "equal", "time_based"])
@pytest.mark.parametrize(("first_hop", "max_hop"), [(15, 100), (5, 50), (30, 200), (15, 25)])
def test_every_chunk_of_every_prompt_length_fits_a_graph(stack, strategy, first_hop, max_hop):
    """The UNet's first hop is extended to a training chunk's boundary: up to 39 tokens by default, 41 if it is the only
    chunk, and more than `max_hop_tokens` if that is 25. Graphs for 64 frames once left those to eager kernels."""
    limits = limits_of(stack, first_hop_tokens=first_hop, max_hop_tokens=max_hop)
    boundary = stacks.named(stack).chunk_boundary
    rules = HopRules(strategy=strategy, first_hop=first_hop, max_hop=max_hop, boundary=boundary)
    longest_first = 0
    for prompt, length in itertools.product(range(26), (3, first_hop + 2, first_hop + 26, 400)):
        schedule, first = rules.schedule(prompt, clock=itertools.count().__next__), True
        while (hop := schedule.next_hop(length, ended=True)) is not None:
            frames = TOKEN_MEL_RATIO * (hop.end - hop.offset)
            classes = limits.first_chunk_frames if first else limits.chunk_frames
            assert frames <= classes[-1]
            longest_first = max(longest_first, frames if first else 0)
            first = False
    # and they are no larger than needed: the next smaller class would not do
    assert limits.first_chunk_frames[-2:][0] < longest_first or len(limits.first_chunk_frames) == 1


def test_the_default_sizes():
    limits = BatchLimits()
    assert limits.chunk_frames == (32, 64, 104, 128, 208)
    assert limits.window_tokens == (160, 208, 256, 320, 416, 512, 768, 1024, 1232)
    assert limits.prompt_frames == (128, 256, 384, 512, 768, 1024, 1504)
    sizes = limits.sizes(limits.chunk_frames, DIT_FRAMES)
    assert {(64, 104), (32, 208)} <= set(sizes) and (64, 128) not in sizes
    assert limits.max_chunks == 64


@pytest.mark.parametrize(("max_streams", "batches"), [(1, (1,)), (3, (1, 2, 3)), (32, (1, 2, 4, 8, 16, 32)), (400, 7)])
def test_graphs_are_made_for_batches_that_the_streams_can_fill(max_streams, batches):
    made = {B for B, _ in BatchLimits(max_streams=max_streams).sizes((32,), 1 << 20)}
    assert made == set(batches) if isinstance(batches, tuple) else len(made) == batches


def test_a_hop_beyond_a_batch_is_refused_with_both_values():
    with pytest.raises(ValueError, match="max_hop_tokens 2100 makes chunks of 4208 mel frames; a batch holds 4096"):
        BatchLimits(max_hop_tokens=2100)


def test_a_length_beyond_every_graph_is_logged_once(monkeypatch, caplog):
    """Capturing needs a GPU; which size fits does not."""
    monkeypatch.setattr(graphs_module, "_warm_up", lambda *_: torch.zeros(1))
    monkeypatch.setattr(graphs_module, "_capture", lambda *_: None)
    graphs = Graphs(lambda: None, lambda *_: (), [(1, 32), (4, 32), (1, 64)], "the vocoder")
    assert graphs.fitting(3, 30) == (4, 32)
    assert graphs.fitting(2, 40) is None and caplog.records == []  # a batch that can be split
    assert graphs.fitting(1, 99, warn=False) is None and caplog.records == []  # a whole utterance
    assert graphs.fitting(1, 65) is graphs.fitting(1, 90) is None
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "the vocoder: a length of 65 is beyond the largest CUDA graph"
    ]
