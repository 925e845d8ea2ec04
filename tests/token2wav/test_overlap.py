"""Cross-fades of chunks, without a change of loudness or a click."""

from pathlib import Path

import pytest
import torch

from common.constants import OVERLAP_SAMPLES
from common.token2wav.hift.overlap import cross_fade, hamming_window, raw_hamming_window
from tools.parity.fixture import Fixture

GOLDEN = Path(__file__).parents[1] / "assets" / "golden"


def test_the_raw_window_equals_that_of_upstream():
    stored = Fixture(GOLDEN / "item8a_fade_in_out.json")["in/window_f64"]
    window = raw_hamming_window(len(stored) // 2)
    assert torch.equal(torch.cat([window.rising, window.falling]), stored)


def test_the_window_halves_have_the_length_of_the_overlap_and_sum_to_one():
    window = hamming_window()
    assert window.rising.shape == window.falling.shape == (OVERLAP_SAMPLES,)
    torch.testing.assert_close(window.rising + window.falling, torch.ones(OVERLAP_SAMPLES, dtype=torch.float64))


def test_the_rising_half_mirrors_the_falling_half():
    window = hamming_window(100)
    assert (window.rising.diff() > 0).all()
    torch.testing.assert_close(window.rising.flip(0), window.falling)


@pytest.mark.parametrize("hops", [[300], [100, 100, 100], [101, 250, 137]])
def test_a_signal_split_into_overlapping_chunks_is_reconstructed(hops):
    torch.manual_seed(3)
    overlap = 100
    window = hamming_window(overlap)
    wave = torch.randn(sum(hops) + overlap)
    parts, withheld, start = [], wave[:overlap], 0
    for hop in hops:
        chunk = cross_fade(withheld, wave[start : start + hop + overlap], window)
        parts.append(chunk[:-overlap])
        withheld, start = chunk[-overlap:], start + hop
    torch.testing.assert_close(torch.cat([*parts, withheld]), wave)


def test_only_the_end_of_a_long_tail_is_faded():
    window = hamming_window(10)
    tail, head = torch.randn(25), torch.randn(12)
    assert torch.equal(cross_fade(tail, head, window), cross_fade(tail[-10:], head, window))


def test_inputs_are_not_modified():
    tail, head = torch.ones(10), torch.zeros(12)
    faded = cross_fade(tail, head, hamming_window(10))
    assert faded.dtype == torch.float32
    assert torch.equal(head, torch.zeros(12))
    assert torch.equal(faded[10:], head[10:])


@pytest.mark.parametrize(("tail", "head"), [(9, 20), (20, 9)])
def test_audio_shorter_than_the_window_is_an_error(tail, head):
    with pytest.raises(ValueError, match=f"cannot fade {tail} into {head} samples over a window of 10"):
        cross_fade(torch.zeros(tail), torch.zeros(head), hamming_window(10))
