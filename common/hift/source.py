"""Harmonic source: the excitation that the generator's convolutions shape into speech."""

import math

import torch
from torch import Tensor, nn

from common.hift.config import HiFTConfig


class HarmonicSource(nn.Module):
    """Sines at f0 and its overtones with added noise, merged by a learned layer.

    The noise comes from the caller, so that a stream can be repeated and does not depend on its neighbours in a batch.
    Upstream also draws an initial phase per harmonic, which its interpolation then never reads; it is left out.
    """

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        self.config = config
        self.l_linear = nn.Linear(config.harmonics + 1, 1)

    def forward(self, f0: Tensor, noise: Tensor) -> Tensor:
        """f0 (B, T) in Hz, noise (B, T*hop, harmonics+1) of unit variance -> source (B, 1, T*hop) in -1..1."""
        waves = self.sines(f0, noise)
        return torch.tanh(self.l_linear(waves)).transpose(1, 2)  # (B, T*hop, 1) -> (B, 1, T*hop)

    def sines(self, f0: Tensor, noise: Tensor) -> Tensor:
        """The harmonics before they are merged, (B, T*hop, harmonics+1): silent but for noise where unvoiced."""
        config = self.config
        voiced = (f0 > config.voiced_threshold).repeat_interleave(config.hop, dim=1)[..., None]  # (B, T*hop, 1)
        waves = config.sine_amplitude * torch.sin(2 * math.pi * self._phase(f0))
        deviation = torch.where(voiced, config.noise_deviation, config.sine_amplitude / 3)
        return torch.where(voiced, waves, 0.0) + deviation * noise

    def _phase(self, f0: Tensor) -> Tensor:
        """(B, T) -> phase of every harmonic at every sample in cycles, (B, T*hop, harmonics+1).

        As upstream has it, phase is summed per frame, holds at the middle of the frame, and is linear between middles
        and constant before the first and after the last. The sum runs in float64 and loses its whole cycles, so that
        a sample of a long recording is as exact as one of the first frame.
        """
        hop = self.config.hop
        harmonic = torch.arange(1, self.config.harmonics + 2, device=f0.device, dtype=torch.float64)
        step = (
            (f0[:, None].double() * harmonic[:, None] / self.config.sample_rate) % 1 * hop
        )  # (B, H, T) cycles a frame
        middle = (step.cumsum(dim=2) % 1).float()
        # Segment j lies between the middles of frames j-1 and j; the outer two stand still.
        start = torch.cat([middle[..., :1], middle], dim=2)[..., None]  # (B, H, T+1, 1)
        slope = nn.functional.pad(step[..., 1:].float(), (1, 1))[..., None]
        # A frame's middle is a sample of its own if the hop is odd and lies between two if it is even.
        ramp = (torch.arange(hop, device=f0.device) + 0.5 * (1 - hop % 2)) / hop
        phase = (start + slope * ramp).flatten(2)  # (B, H, (T+1)*hop)
        first = hop - hop // 2
        return phase[..., first : first + f0.shape[1] * hop].transpose(1, 2)  # (B, H, T*hop) -> (B, T*hop, H)
