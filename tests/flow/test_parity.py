"""The flow networks compared with upstream's values and listings of official checkpoints (tests/assets/golden)."""

import json
from pathlib import Path

import pytest
import torch

from common.checkpoint import shapes_of
from common.flow import DiTFlow, DiTFlowConfig, UNetFlow, UNetFlowConfig
from tools.parity import flow_dit, flow_unet
from tools.parity.fixture import Fixture
from tools.parity.runner import run_fixture

GOLDEN = Path(__file__).parents[1] / "assets" / "golden"
CHECKS = flow_unet.CHECKS | flow_dit.CHECKS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.startswith("fullsize") else ()) for name in CHECKS]
)
def test_every_stored_output_is_computed_within_its_tolerance(name):
    results = list(run_fixture(Fixture(GOLDEN / f"{name}.json"), CHECKS[name]))
    assert results
    assert not [f"{result.name}: {result.detail}" for result in results if result.verdict != "PASS"]


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
