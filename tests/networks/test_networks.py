"""Flows: their checkpoints, the solve, and attention in blocks of queries; the whole flows are in
tests/token2wav/test_chunks_equal_whole.py. HiFT: parity with upstream's values, batches, and strict loading of
checkpoints in the official form."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.checkpoint import read_state
from cosyvoice_triton.constants import EULER_STEPS, GUIDANCE, HOP_SAMPLES
from cosyvoice_triton.networks import flow as networks
from cosyvoice_triton.networks.flow import encoder as encoder_module
from cosyvoice_triton.networks.flow.base import FlowMatching, time_schedule
from cosyvoice_triton.networks.flow.config import FlowConfig, euler_steps, stated_solve
from cosyvoice_triton.networks.hift import fuse_weight_norm, load_hift, split_weight_norm
from torch import Tensor, nn

from tests.parity import flow_unet
from tests.parity.fixture import Fixture
from tests.parity.hift import build

ENCODER = networks.EncoderConfig(width=32, heads=2, feed_forward=48, blocks=2, up_blocks=1)
UNET = networks.UNetFlowConfig(
    vocab=50,
    speaker_dim=24,
    encoder=ENCODER,
    estimator=networks.UNetConfig(channels=16, heads=2, blocks=1, mid_stages=2),
)
DIT = networks.DiTFlowConfig(
    vocab=50,
    speaker_dim=24,
    encoder=ENCODER,
    estimator=networks.DiTConfig(width=32, depth=2, heads=2, head_dim=16, feed_forward=64),
)
FLOWS = pytest.mark.parametrize(
    ("network", "config", "load"),
    [(networks.UNetFlow, UNET, networks.load_unet_flow), (networks.DiTFlow, DIT, networks.load_dit_flow)],
)


def saved(flow: torch.nn.Module, folder: Path, **changes: torch.Tensor | None) -> Path:
    """Path of the flow's checkpoint; `changes` replace or add tensors, None removes one."""
    state = flow.state_dict() | changes
    path = folder / "flow.pt"
    torch.save({key: tensor for key, tensor in state.items() if tensor is not None}, path)
    return path


@FLOWS
def test_sizes_are_read_from_the_checkpoint_and_weights_are_unchanged(network, config, load, tmp_path):
    flow = network(config)
    loaded = load(saved(flow, tmp_path))
    assert loaded.config == config
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    for key, tensor in flow.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key


@FLOWS
def test_every_difference_is_named(network, config, load, tmp_path):
    changes = {
        "encoder.after_norm.bias": None,
        "encoder_proj.bias": torch.zeros(3),
        "decoder.estimator.extra.weight": torch.zeros(1),
    }
    path = saved(network(config), tmp_path, **changes)
    with pytest.raises(ValueError) as caught:
        load(path)
    message = str(caught.value)
    assert "missing: encoder.after_norm.bias" in message
    assert "mismatched: encoder_proj.bias is [3], not [80]" in message
    assert "unexpected: decoder.estimator.extra.weight" in message


@FLOWS
def test_a_missing_tensor_that_gives_a_size_is_named(network, config, load, tmp_path):
    path = saved(network(config), tmp_path, **{"encoder.encoders.0.self_attn.pos_bias_u": None})
    with pytest.raises(ValueError, match=r"encoder\.encoders\.0\.self_attn\.pos_bias_u"):
        load(path)


def test_the_checkpoint_of_the_other_flow_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"decoder\.estimator\.blocks"):
        networks.load_dit_flow(saved(networks.UNetFlow(UNET), tmp_path))
    with pytest.raises(ValueError, match=r"decoder\.estimator\.down_blocks"):
        networks.load_unet_flow(saved(networks.DiTFlow(DIT), tmp_path))


def test_the_stack_of_a_flow_is_read_from_its_tensor_names(tmp_path):
    assert stacks.of_flow(read_state(saved(networks.UNetFlow(UNET), tmp_path)), "flow.pt") is stacks.UNET
    assert stacks.of_flow(read_state(saved(networks.DiTFlow(DIT), tmp_path)), "flow.pt") is stacks.DIT
    torch.save({"spk_embed_affine_layer.weight": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="other.pt is the flow of no stack .dit: Step-Audio2's DiT flow; unet: Cosy"):
        stacks.of_flow(read_state(tmp_path / "other.pt"), tmp_path / "other.pt")


@pytest.mark.parametrize("content", [{"a": torch.nn.Linear(2, 2)}, {"a": object}, b"root:x:0:0:root", b"PK\3\4", b""])
def test_a_file_of_something_else_is_named_without_torch_s_advice_to_run_it(tmp_path, content):
    path = tmp_path / "flow.pt"
    with pytest.raises(ValueError, match="flow.pt does not exist"):
        read_state(path)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match="flow.pt is not a file of tensors: ") as error:
        read_state(path)
    assert not {"weights_only", "trust", "Weights"} & set(re.findall(r"\w+", str(error.value)))


GRID = (0.0, 0.125, 0.25, 0.375, 0.75, 1.0)


@pytest.mark.parametrize("guidance", [0.0, 0.5])
def test_the_solve_is_a_plain_loop_over_the_times_of_the_grid(guidance: float) -> None:
    """With guidance each conditional row has an unconditional one; without, there are conditional rows only."""
    noise, mu = torch.randn(2, 3, 4, 5, dtype=torch.float64).unbind()
    seen = []

    def velocity(step: int, x: Tensor, time: Tensor, mu: Tensor, speaker: Tensor, condition: Tensor) -> Tensor:
        seen.append((step, len(x), time.unique().item()))
        return x.sin() * time[:, None, None] + mu + speaker[:, :, None] - condition

    def field(x: Tensor, time: float, given: Tensor) -> Tensor:
        return x.sin() * time + given

    expected, given = noise.clone(), mu + mu[:, :, :1] - mu.flip(0)
    for begin, end in zip(GRID, GRID[1:], strict=False):
        conditional, unconditional = field(expected, begin, given), field(expected, begin, torch.zeros(()))
        expected = expected + (end - begin) * ((1 + guidance) * conditional - guidance * unconditional)
    decoder = FlowMatching(nn.Identity(), guidance, GRID)
    found = decoder.solve(velocity, noise, mu, mu[:, :, 0], mu.flip(0), steps=5)
    torch.testing.assert_close(found, expected)
    assert seen == [(step, 6 if guidance else 3, time) for step, time in enumerate(GRID[:-1])]


def test_without_a_grid_the_times_are_upstreams_cosine_to_the_last_bit() -> None:
    cosine = (1 - torch.cos(torch.linspace(0, 1, EULER_STEPS + 1) * 0.5 * torch.pi)).tolist()
    times, widths = time_schedule(EULER_STEPS)
    assert time_schedule(EULER_STEPS, cosine) == (times, widths)
    assert times == pytest.approx([1 - math.cos(math.pi / 2 * step / 10) for step in range(10)], abs=1e-6)
    assert sum(widths) == pytest.approx(1)


def test_a_checkpoint_states_its_solve_next_to_its_flow(tmp_path: Path) -> None:
    flow = tmp_path / "flow.pt"
    assert stated_solve(flow) == {} and euler_steps(flow) == EULER_STEPS and euler_steps(flow, 7) == 7
    assert (FlowConfig().guidance, FlowConfig().rows) == (GUIDANCE, 2)
    flow.with_suffix(".json").write_text(json.dumps({"steps": 5, "time_grid": GRID, "guidance": 0}))
    assert euler_steps(flow) == 5
    config = FlowConfig(**stated_solve(flow))
    assert (config.steps, config.time_grid, config.rows) == (5, GRID, 1)


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ('{"steps": 3, "time_grid": [0, 0.5, 1]}', "is not 4 rising times from 0 to 1, for 3 steps"),
        ('{"steps": 2, "time_grid": [0, 1, 1]}', "is not 3 rising times"),
        ('{"steps": 0}', "0 steps and guidance 0.7"),
        ('{"guidance": NaN}', "guidance nan"),
        ('{"step": 3}', r"it has \['step'\]; use steps, time_grid and guidance"),
        ("[]", "flow.json"),
        ('{"steps": "5"}', "flow.json"),
        ('{"steps": 5.0}', "5.0 steps"),
    ],
)
def test_a_solve_that_cannot_be_is_refused_with_its_file(tmp_path: Path, stated: str, words: str) -> None:
    (tmp_path / "flow.json").write_text(stated)
    with pytest.raises(ValueError, match=words):
        stated_solve(tmp_path / "flow.pt")


GOLDEN = Path(__file__).parents[1] / "assets" / "golden"


@pytest.fixture
def encoder():
    return flow_unet.build(Fixture(GOLDEN / "item4_cosyvoice2_flow_inference.json")).encoder


@pytest.mark.parametrize("visible", ["all", "chunks"])
def test_scores_in_blocks_of_queries_equal_those_at_once(encoder, visible, monkeypatch):
    """The last block is shorter, with an odd number of scores; one block has a single query."""
    T, ahead = 17, encoder.config.lookahead
    windows = torch.randn(2, T, 1 + ahead, encoder.config.width, generator=torch.Generator().manual_seed(5))
    present = torch.ones(2, T, 1 + ahead, dtype=torch.bool)
    ends = torch.full((2, T), T) if visible == "all" else ((torch.arange(T) // 5 + 1) * 5).clamp(max=T).expand(2, T)
    expected = encoder(windows, present, ends)
    monkeypatch.setattr(encoder_module, "SCORES_AT_ONCE", 1)
    for queries in (4, 11):
        monkeypatch.setattr(encoder_module, "QUERIES_AT_ONCE", queries)
        assert len(encoder_module.query_blocks(T, 8)) > 1
        torch.testing.assert_close(encoder(windows, present, ends), expected, atol=2e-5, rtol=0)


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
