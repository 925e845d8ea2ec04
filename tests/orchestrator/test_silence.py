import json

import numpy as np
import pytest
from cosyvoice_triton import stacks
from cosyvoice_triton.orchestrator.token_buffer import SilenceFilter
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes import FakeLM, speech_request
from tests.support.pipeline import Pipeline
from tests.support.streams import GOLDEN3

SILENT = frozenset({1, 2})


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        ([9, 1, 1, 1, 1, 1, 8], [9, 1, 1, 1, 1, 1, 8]),  # five are spoken
        ([9, 1, 1, 1, 1, 1, 1, 8], [9, 1, 1, 1, 1, 1, 8]),
        ([1, 2, 1, 2, 1, 2, 1, 8], [1, 2, 1, 2, 1, 8]),  # a run at the start, of several tokens
        ([9, 2, 2, 2, 2, 2, 2, 2], [9, 2, 2, 2, 2, 2]),  # at the end
        ([1] * 7 + [9] + [2] * 7, [1] * 5 + [9] + [2] * 5),  # any other token begins a new count
        ([1] * 13, [1] * 5),  # nothing else
    ],
)
def test_of_a_run_of_silent_tokens_the_first_five_are_kept(tokens: list[int], kept: list[int]) -> None:
    assert SilenceFilter(SILENT).kept(tokens) == kept


def test_cosyvoice3_has_upstreams_silent_tokens_and_only_it() -> None:
    upstreams = json.loads((GOLDEN3 / "item5b_cosyvoice3_silent_tokens.json").read_text())
    assert stacks.COSYVOICE3.silent_tokens == set(upstreams["silent_tokens"])
    assert [stack.name for stack in stacks.BUILT_IN if stack.silent_tokens] == ["cosyvoice3"]


@given(st.lists(st.sampled_from([1, 2, 3]), max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_the_grouping_of_arrivals_changes_nothing(tokens: list[int], cuts: list[int]) -> None:
    at, arriving = [0, *sorted(cuts), len(tokens)], SilenceFilter(SILENT)
    parts = [tokens[begin:end] for begin, end in zip(at, at[1:], strict=False)]
    assert [token for part in parts for token in arriving.kept(part)] == SilenceFilter(SILENT).kept(tokens)


def test_dropped_tokens_reach_no_chunk_and_every_segment_counts_anew() -> None:
    """A chunk is due after 18 tokens: the 18th that is spoken here, not the 18th that arrives."""
    arrivals = [[1, 1, 1], [1, 1, 1, 1], *[[9]] * 12, [7] * 8, [1, 1]]
    pipeline = Pipeline(FakeLM(*arrivals), silent_tokens=SILENT)
    audio = pipeline.run(pipeline.synthesize(speech_request(text="one|two")))
    spoken = [1] * 5 + [9] * 12 + [7] * 8 + [1] * 2
    assert [len(waveform) for waveform in audio] == [15, 12] * 2
    np.testing.assert_array_equal(np.concatenate(audio), spoken * 2)
    pipeline.run(pipeline.offline(speech_request(text="one")))
    assert pipeline.token2wav.offline_calls == [(spoken, 1.0)]
