"""The Euler solve and what a checkpoint states of it."""

import json
import math
from pathlib import Path

import pytest
import torch
from cosyvoice_triton.constants import EULER_STEPS, GUIDANCE
from cosyvoice_triton.networks.flow.base import FlowMatching, time_schedule
from cosyvoice_triton.networks.flow.config import FlowConfig, euler_steps, stated_solve
from torch import Tensor, nn

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
