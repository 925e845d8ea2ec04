"""Conditional flow matching: the time schedule, classifier-free guidance and the Euler solve."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from cosyvoice_triton.networks.flow.config import check_time_grid

# (Euler step, x (R, C, T), time (R,), encoder output (R, C, T), speaker (R, C), condition (R, C, T)) -> (R, C, T)
Velocity = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

Estimator = TypeVar("Estimator", bound=nn.Module)


def time_schedule(steps: int, time_grid: Sequence[float] = ()) -> tuple[list[float], list[float]]:
    """Return times and step widths of a grid; without one, of the cosine t = 1 - cos(pi / 2 * i / steps), dense near
    the noise (t = 0). ValueError if a grid is of other steps.

    Time is accumulated in float32 and widths are differences to the accumulated time, as in upstream's solver.
    """
    check_time_grid(time_grid, steps)
    cosine = 1 - torch.cos(torch.linspace(0, 1, steps + 1, dtype=torch.float32) * 0.5 * torch.pi)
    span = torch.tensor(time_grid, dtype=torch.float32) if time_grid else cosine
    time, times, widths = span[0], [], []
    for following in span[1:]:
        width = following - time
        times.append(time.item())
        widths.append(width.item())
        time = time + width
    return times, widths


class FlowMatching(nn.Module, Generic[Estimator]):
    """Euler solve from noise to mel. Holds the estimator under the checkpoint's key `decoder.estimator`.

    guidance, time_grid: see `FlowConfig`. A batch has `rows` rows for each stream, the conditional ones first.
    """

    def __init__(self, estimator: Estimator, guidance: float, time_grid: Sequence[float] = ()) -> None:
        super().__init__()
        self.estimator = estimator
        self.guidance = guidance
        self.rows = 2 if guidance else 1
        self._time_grid = time_grid

    def schedule(self, steps: int) -> tuple[list[float], list[float]]:
        """Return times and step widths, see `time_schedule`."""
        return time_schedule(steps, self._time_grid)

    def guided(self, velocity: Tensor) -> Tensor:
        """Return the velocity of streams, given that of their rows: (1 + w) * conditional - w * unconditional."""
        if self.rows == 1:
            return velocity
        conditional, unconditional = velocity.chunk(2)
        return (1 + self.guidance) * conditional - self.guidance * unconditional

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
        """Solve: noise (1 or B, C, T), mu and condition (B, C, T), speaker (B, C) -> mel (B, C, T).

        Conditional and unconditional rows are one batch. The state keeps the dtype of the noise (float32), whatever the
        estimator computes in. An exception of `before_step` ends the solve.
        """
        B = mu.shape[0]
        times, widths = self.schedule(steps)
        # One time value per row: exported estimators take it as (rows,).
        time_rows = torch.tensor(times, device=mu.device)[:, None].repeat(1, self.rows * B)
        if self.rows > 1:
            mu, speaker, condition = (torch.cat([part, torch.zeros_like(part)]) for part in (mu, speaker, condition))
        x = noise.expand(B, -1, -1)
        for step, width in enumerate(widths):
            before_step()
            rows = x.repeat(self.rows, 1, 1).to(mu.dtype)
            x = x + width * self.guided(velocity(step, rows, time_rows[step], mu, speaker, condition))
        return x
