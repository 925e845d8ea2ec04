import math

import pytest
import torch
from cosyvoice_triton.networks.flow.matching import FlowMatching, time_schedule
from torch import nn


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_schedule_starts_at_the_noise_and_ends_at_the_mel(steps):
    times, widths = time_schedule(steps)
    assert len(times) == len(widths) == steps
    assert times[0] == 0
    assert times[-1] + widths[-1] == pytest.approx(1, abs=1e-6)
    assert times == pytest.approx([1 - math.cos(math.pi / 2 * i / steps) for i in range(steps)], abs=1e-6)


def test_solve_follows_a_constant_guided_velocity_from_the_noise():
    B, C, T = 2, 3, 4
    decoder = FlowMatching(nn.Identity(), guidance=0.7)
    noise, mu = torch.randn(1, C, T), torch.randn(B, C, T)

    def velocity(step, x, t, mu, speaker, condition):
        return mu + 0.5  # conditional rows: mu + 0.5, unconditional rows: 0.5

    mel = decoder.solve(velocity, noise, mu, torch.randn(B, C), torch.randn(B, C, T), steps=5)
    torch.testing.assert_close(mel, noise + 1.7 * (mu + 0.5) - 0.7 * 0.5)


def test_unconditional_rows_come_last_with_the_same_state_and_one_time_value_each():
    B, C, T = 2, 3, 4
    seen = []

    def velocity(step, x, t, mu, speaker, condition):
        seen.append((step, t))
        assert torch.equal(x[:B], x[B:])
        for part in (mu, speaker, condition):
            assert part[:B].all()
            assert not part[B:].any()
        return x

    ones = torch.ones(B, C, T)
    FlowMatching(nn.Identity(), 0.7).solve(velocity, torch.randn(1, C, T), ones, ones[:, :, 0], ones, steps=3)
    assert [step for step, _ in seen] == [0, 1, 2]
    for (_, t), expected in zip(seen, time_schedule(3)[0], strict=True):
        assert t.tolist() == pytest.approx([expected] * 2 * B)


def test_the_state_keeps_the_precision_of_the_noise_with_a_half_precision_estimator():
    mu = torch.zeros(1, 2, 3, dtype=torch.float16)
    dtypes = []

    def velocity(step, x, *conditions):
        dtypes.append(x.dtype)
        return torch.zeros_like(x)

    noise = torch.randn(1, 2, 3)
    mel = FlowMatching(nn.Identity(), 0.7).solve(velocity, noise, mu, mu[:, :, 0], mu, steps=2)
    assert dtypes == [torch.float16] * 2
    assert torch.equal(mel, noise)
