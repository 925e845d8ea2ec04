"""Conditional flow matching: the time schedule, classifier-free guidance and the Euler solve."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

# (Euler step, x (2B, C, T), time (2B,), encoder output (2B, C, T), speaker (2B, C), condition (2B, C, T)) -> (2B, C, T)
Velocity = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

Estimator = TypeVar("Estimator", bound=nn.Module)


def time_schedule(steps: int) -> tuple[list[float], list[float]]:
    """Times and step widths of the cosine schedule t = 1 - cos(pi / 2 * i / steps), dense near the noise (t = 0).

    Time is accumulated in float32 and widths are differences to the accumulated time, as in upstream's solver.
    """
    span = 1 - torch.cos(torch.linspace(0, 1, steps + 1, dtype=torch.float32) * 0.5 * torch.pi)
    time, times, widths = span[0], [], []
    for following in span[1:]:
        width = following - time
        times.append(time.item())
        widths.append(width.item())
        time = time + width
    return times, widths


class FlowMatching(nn.Module, Generic[Estimator]):
    """Euler solve from noise to mel. Holds the estimator under the checkpoint's key `decoder.estimator`.

    guidance: weight w of classifier-free guidance, velocity = (1 + w) * conditional - w * unconditional.
    """

    def __init__(self, estimator: Estimator, guidance: float) -> None:
        super().__init__()
        self.estimator = estimator
        self.guidance = guidance

    def solve(
        self,
        velocity: Velocity,
        noise: Tensor,
        mu: Tensor,
        speaker: Tensor,
        condition: Tensor,
        steps: int,
        before_step: Callable[[], object] = lambda: None,
    ) -> Tensor:
        """noise (1 or B, C, T), mu and condition (B, C, T), speaker (B, C) -> mel (B, C, T).

        Conditional and unconditional rows are one batch, conditional rows first. The state keeps the dtype of the
        noise (float32), whatever the estimator computes in. An exception of `before_step` ends the solve.
        """
        B = mu.shape[0]
        times, widths = time_schedule(steps)
        # One time value per row: exported estimators take it as (rows,).
        time_rows = torch.tensor(times, device=mu.device)[:, None].repeat(1, 2 * B)
        mu, speaker, condition = (torch.cat([part, torch.zeros_like(part)]) for part in (mu, speaker, condition))
        x = noise.expand(B, -1, -1)
        for step, width in enumerate(widths):
            before_step()
            rows = torch.cat([x, x]).to(mu.dtype)
            conditional, unconditional = velocity(step, rows, time_rows[step], mu, speaker, condition).chunk(2)
            x = x + width * ((1 + self.guidance) * conditional - self.guidance * unconditional)
        return x
