"""HiFT: parity with upstream's values, batches, and strict loading of checkpoints in the official form."""

import json
from pathlib import Path

import pytest
import torch

from common.constants import HOP_SAMPLES
from common.hift import HiFTConfig, HiFTGenerator, fuse_weight_norm, load_hift, split_weight_norm
from tools.parity.fixture import Fixture
from tools.parity.hift import CHECKS, build
from tools.parity.runner import run_fixture

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


@pytest.mark.parametrize("name", CHECKS)
def test_outputs_equal_those_of_upstream(name):
    results = run_fixture(Fixture(GOLDEN / f"{name}.json"), CHECKS[name])
    assert results
    assert [result for result in results if result.verdict != "PASS"] == []


def test_official_sizes_have_the_official_keys_and_shapes():
    listed = json.loads((GOLDEN / "manifests" / "cosyvoice2_hift_pt.json").read_text())
    with torch.device("meta"):
        state = split_weight_norm(HiFTGenerator().state_dict())
    assert {key: list(value.shape) for key, value in state.items()} == listed


def test_rows_of_a_batch_equal_the_same_rows_alone(hift, fixture):
    torch.manual_seed(1)
    mel = torch.cat([fixture["in/mel"], torch.randn(2, *fixture["in/mel"].shape[1:])])
    noise = torch.randn(3, mel.shape[2] * hift.config.hop, hift.config.harmonics + 1)
    cached = torch.randn(3, 1, 1000)
    speech, source = hift(mel, noise, cached)
    for row in range(3):
        one = slice(row, row + 1)
        alone, alone_source = hift(mel[one], noise[one], cached[one])
        torch.testing.assert_close(speech[one], alone, atol=1e-4, rtol=0)
        torch.testing.assert_close(source[one], alone_source, atol=1e-4, rtol=0)


def test_a_cached_source_replaces_the_first_samples_only(hift, fixture):
    mel, noise = fixture["in/mel"], fixture["in/draw1_randn"]
    cached = torch.full((1, 1, 700), 0.25)
    _, fresh = hift(mel, noise)
    _, source = hift(mel, noise, cached)
    assert torch.equal(source[..., :700], cached)
    assert torch.equal(source[..., 700:], fresh[..., 700:])


def test_an_empty_cached_source_changes_nothing(hift, fixture):
    mel, noise = fixture["in/mel"], fixture["in/draw1_randn"]
    speech, _ = hift(mel, noise)
    empty, _ = hift(mel, noise, torch.zeros(1, 1, 0))
    assert torch.equal(speech, empty)


def test_one_frame_is_rendered(hift):
    speech, source = hift(torch.zeros(1, 80, 1), torch.zeros(1, hift.config.hop, hift.config.harmonics + 1))
    assert speech.shape == (1, hift.config.hop)
    assert source.shape == (1, 1, hift.config.hop)
    assert speech.isfinite().all()


def test_a_long_steady_tone_stays_in_phase(hift):
    """After a minute the fundamental is still a sine of exactly f0: dropping whole cycles loses no precision."""
    T, f0, rate, hop = 3000, 123.456, hift.config.sample_rate, hift.config.hop
    noise = torch.zeros(1, T * hop, hift.config.harmonics + 1)
    wave = hift.m_source.sines(torch.full((1, T), f0), noise)[0, :, 0].double()
    last = slice((T - 1) * hop - hop // 2, (T - 1) * hop + hop // 2)
    # Middle of frame t has the phase of t + 1 whole frames.
    samples = torch.arange(T * hop, dtype=torch.float64)[last] + 0.5 + hop / 2
    f0 = float(torch.tensor(f0))
    expected = hift.config.sine_amplitude * torch.sin(2 * torch.pi * f0 / rate * samples)
    torch.testing.assert_close(wave[last], expected, atol=1e-5, rtol=0)


def test_unvoiced_frames_are_only_noise(hift):
    noise = torch.randn(1, 2 * hift.config.hop, hift.config.harmonics + 1)
    waves = hift.m_source.sines(torch.tensor([[hift.config.voiced_threshold, 0.0]]), noise)
    torch.testing.assert_close(waves, noise * hift.config.sine_amplitude / 3)


@pytest.mark.parametrize("shape", [(1, HOP_SAMPLES * 12 - 1, 9), (1, HOP_SAMPLES * 12, 8), (2, HOP_SAMPLES * 12, 9)])
def test_noise_of_another_shape_is_refused(hift, fixture, shape):
    with pytest.raises(ValueError, match=r"noise of shape .* 12 frames"):
        hift(fixture["in/mel"], torch.zeros(shape))


def test_a_cached_source_longer_than_the_render_is_refused(hift, fixture):
    with pytest.raises(ValueError, match="cached source of 5761 samples for 5760"):
        hift(fixture["in/mel"], fixture["in/draw1_randn"], torch.zeros(1, 1, 5761))


def test_fusing_agrees_with_torch_weight_norm():
    torch.manual_seed(2)
    conv = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(3, 5, 7))
    with torch.no_grad():
        conv.parametrizations.weight.original0.mul_(1.5)
    fused = fuse_weight_norm(torch.nn.ModuleDict({"conv": conv}).state_dict())
    torch.testing.assert_close(fused["conv.weight"], conv.weight.detach())


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
    assert torch.equal(loaded.f0(fixture["in/mel"]), hift.f0(fixture["in/mel"]))


def test_a_checkpoint_that_does_not_fit_names_every_key(checkpoint):
    path, state = checkpoint
    del state["conv_pre.bias"]
    state["stray"] = torch.zeros(1)
    state["conv_post.bias"] = torch.zeros(5)
    torch.save(state, path)
    with pytest.raises(ValueError) as error:
        load_hift(path)
    message = str(error.value)
    assert "missing: conv_pre.bias" in message
    assert "unexpected: stray" in message
    assert "mismatched: conv_post.bias is [5], not [18]" in message


def test_a_missing_half_of_a_weight_norm_pair_is_named(checkpoint):
    path, state = checkpoint
    del state["ups.1.parametrizations.weight.original0"]
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"ups\.1\..*original1 has no ups\.1\..*original0"):
        load_hift(path)


def test_the_checkpoint_of_another_network_is_refused_with_the_missing_key(tmp_path):
    torch.save({"encoder.weight": torch.zeros(2, 2)}, tmp_path / "hift.pt")
    with pytest.raises(ValueError, match=r"'conv_pre\.weight' gives a size"):
        load_hift(tmp_path / "hift.pt")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.pt does not exist"):
        load_hift(tmp_path / "nowhere.pt")


def test_a_file_with_code_in_it_is_refused(tmp_path):
    torch.save({"weights": HiFTConfig()}, tmp_path / "hift.pt")
    with pytest.raises(ValueError, match="is not a file of tensors"):
        load_hift(tmp_path / "hift.pt")
