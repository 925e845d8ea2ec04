"""HiFT: parity with upstream's values, batches, and strict loading of checkpoints in the official form."""

from pathlib import Path

import pytest
import torch
from cosyvoice_triton.constants import HOP_SAMPLES
from cosyvoice_triton.networks.hift import fuse_weight_norm, load_hift, split_weight_norm

from tests.parity.fixture import Fixture
from tests.parity.hift import build

GOLDEN = Path(__file__).parents[1] / "assets" / "golden"


@pytest.fixture(scope="module")
def fixture():
    return Fixture(GOLDEN / "item5_hift.json")


@pytest.fixture(scope="module")
def hift(fixture):
    return build(fixture).requires_grad_(False)


@pytest.fixture
def checkpoint(fixture, tmp_path):
    """(path to write to, official state_dict of the tiny network)."""
    return tmp_path / "hift.pt", fixture.weights()


def test_a_long_steady_tone_stays_in_phase(hift):
    """After a minute the fundamental is still a sine of exactly f0: dropping whole cycles loses no precision."""
    T, f0, rate, hop = 3000, 123.456, hift.config.sample_rate, hift.config.hop
    noise = torch.zeros(1, T * hop, hift.config.harmonics + 1)
    waves, _ = hift.m_source.sines(torch.full((1, T), f0), noise)
    wave = waves[0, :, 0].double()
    last = slice((T - 1) * hop - hop // 2, (T - 1) * hop + hop // 2)
    # Middle of frame t has the phase of t + 1 whole frames.
    samples = torch.arange(T * hop, dtype=torch.float64)[last] + 0.5 + hop / 2
    f0 = float(torch.tensor(f0))
    expected = hift.config.sine_amplitude * torch.sin(2 * torch.pi * f0 / rate * samples)
    torch.testing.assert_close(wave[last], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(1, HOP_SAMPLES * 12 - 1, 9), (1, HOP_SAMPLES * 12, 8), (2, HOP_SAMPLES * 12, 9)])
def test_noise_of_another_shape_is_refused(hift, fixture, shape):
    with pytest.raises(ValueError, match=r"noise of shape .* 12 frames"):
        hift(fixture["in/mel"], torch.zeros(shape))


def test_splitting_and_fusing_gives_the_weights_back(hift):
    state = hift.state_dict()
    back = fuse_weight_norm(split_weight_norm(state))
    assert back.keys() == state.keys()
    for key, value in state.items():
        torch.testing.assert_close(back[key], value)


@pytest.mark.parametrize("prefix", ["", "generator."])
def test_a_checkpoint_loads_with_sizes_taken_from_it(checkpoint, hift, fixture, prefix):
    path, state = checkpoint
    torch.save({prefix + key: value for key, value in state.items()}, path)
    loaded = load_hift(path)
    assert loaded.config == hift.config
    assert not loaded.training
    assert torch.equal(loaded.f0_predictor(fixture["in/mel"]), hift.f0_predictor(fixture["in/mel"]))


def test_a_missing_half_of_a_weight_norm_pair_is_named(checkpoint):
    path, state = checkpoint
    del state["ups.1.parametrizations.weight.original0"]
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"ups\.1\..*original1 has no ups\.1\..*original0"):
        load_hift(path)
