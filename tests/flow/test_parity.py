"""The flow networks compared with upstream's values and listings of official checkpoints (tests/assets/golden)."""

import json
from pathlib import Path

import pytest
import torch
from cosyvoice_triton.checkpoint import shapes_of
from cosyvoice_triton.networks.flow import DiTFlow, DiTFlowConfig, UNetFlow, UNetFlowConfig
from cosyvoice_triton.token2wav.flow.encoder_window import WindowEncoder

from tests.parity import flow_dit, flow_unet
from tests.parity.fixture import Fixture
from tests.parity.runner import all_checks, run_fixture

GOLDEN = Path(__file__).parents[1] / "assets" / "golden"
CHECKS = flow_unet.CHECKS | flow_dit.CHECKS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.startswith("fullsize") else ()) for name in CHECKS]
)
def test_every_stored_output_is_computed_within_its_tolerance(name):
    results = list(run_fixture(Fixture(GOLDEN / f"{name}.json"), CHECKS[name]))
    assert results
    assert not [f"{result.name}: {result.detail}" for result in results if result.verdict != "PASS"]


@pytest.mark.parametrize("name", ["item4_cosyvoice2_flow_inference", "item6d_stepaudio2_flow_streaming"])
def test_the_served_engine_is_what_is_compared(name, monkeypatch):
    """What serving computes, and networks alone do not, makes the fixture fail when it is wrong."""
    encode = WindowEncoder.encode
    monkeypatch.setattr(WindowEncoder, "encode", lambda self, windows, **kwargs: encode(self, windows, **kwargs) + 1e-3)
    results = list(run_fixture(Fixture(GOLDEN / f"{name}.json"), CHECKS[name]))
    of_engine = [result for result in results if "[engine" in result.detail]
    assert len(of_engine) > 9 and {result.verdict for result in of_engine} == {"MISS"}
    assert {result.verdict for result in results if result not in of_engine} == {"PASS"}


@pytest.mark.parametrize("name", ["item4_cosyvoice2_flow_inference", "item6d_stepaudio2_flow_streaming"])
def test_networks_with_another_look_ahead_than_serving_are_computed_by_the_reference(name, monkeypatch):
    for module in (flow_dit, flow_unet):
        monkeypatch.setattr(module, "is_served", lambda config: False)
    results = list(run_fixture(Fixture(GOLDEN / f"{name}.json"), CHECKS[name]))
    assert {result.verdict for result in results} == {"PASS"}
    assert {result.detail.rpartition("[")[2] for result in results} == {"reference]", "network]"}


@pytest.mark.parametrize("name", ["item6c_stepaudio2_flow_inference", "item8c_cosyvoice2_streaming_token2wav"])
def test_the_engine_in_float16_is_compared_with_bounds_of_its_own(name):
    fixture = Fixture(GOLDEN / f"{name}.json", "cpu", torch.float16)
    results = list(run_fixture(fixture, all_checks()[name]))
    assert results and {result.verdict for result in results} == {"PASS"}
    assert all(" float16" in result.name for result in results)
    key = next(key for key in fixture.outputs if fixture[key].is_floating_point())
    largest = fixture[key].abs().max().item()
    assert fixture.tolerance(key).atol == pytest.approx(1e-2 * largest) and fixture.tolerance(key).rms < 3e-3 * largest


@pytest.mark.parametrize(
    ("network", "config", "listing"),
    [
        (UNetFlow, UNetFlowConfig, "cosyvoice2_flow_pt.json"),
        (DiTFlow, DiTFlowConfig, "stepaudio2_token2wav_flow_pt.instantiated.json"),
    ],
)
def test_default_sizes_are_those_of_the_official_checkpoint(network, config, listing):
    listed = {key: torch.Size(shape) for key, shape in json.loads((GOLDEN / "manifests" / listing).read_text()).items()}
    with torch.device("meta"):
        flow = network(config())
    assert shapes_of(flow.state_dict()) == listed
    assert config.from_shapes(listed) == config()
