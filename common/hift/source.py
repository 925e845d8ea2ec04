"""Harmonic source: the excitation signal that the generator's convolutions filter into speech.

The neural source-filter model's source module (Wang et al., arXiv:1904.12088); upstream's `SourceModuleHnNSF2`.
"""

import math

import torch
from torch import Tensor, nn

from common.hift.config import HiFTConfig


class HarmonicSource(nn.Module):
    """Sines at f0 and its overtones with added noise, mixed by a learned linear layer. Keys `m_source.*`.

    The noise is passed in, so that a stream is reproducible and does not depend on the other rows of a batch. Upstream
    also draws an initial phase per harmonic that its interpolation never reads; it is omitted.
    """

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        self.config = config
        self.l_linear = nn.Linear(config.harmonics + 1, 1)

    def forward(self, f0: Tensor, noise: Tensor) -> Tensor:
        """f0 (B, T) in Hz, noise (B, T*hop, harmonics+1) of unit variance -> source (B, 1, T*hop) in -1..1"""
        waves = self.sines(f0, noise)
        return torch.tanh(self.l_linear(waves)).transpose(1, 2)  # (B, T*hop, 1) -> (B, 1, T*hop)

    def sines(self, f0: Tensor, noise: Tensor) -> Tensor:
        """The harmonics before they are mixed, (B, T*hop, harmonics+1): noise alone in unvoiced frames."""
        config = self.config
        voiced = (f0 > config.voiced_threshold).repeat_interleave(config.hop, dim=1)[..., None]  # (B, T*hop, 1)
        waves = config.sine_amplitude * torch.sin(2 * math.pi * self._phase(f0))
        deviation = torch.where(voiced, config.noise_deviation, config.sine_amplitude / 3)
        return torch.where(voiced, waves, 0.0) + deviation * noise

    def _phase(self, f0: Tensor) -> Tensor:
        """f0 (B, T) in Hz -> phase of every harmonic at every sample, (B, T*hop, harmonics+1), in cycles.

        As in upstream, phase is summed per frame; the sum is the phase at the middle of the frame, and phase is linear
        between middles and constant before the first and after the last. The sum is in float64 and drops whole cycles,
        so that a sample of a long recording is as exact as one of the first frame.
        """
        hop = self.config.hop
        harmonic = torch.arange(1, self.config.harmonics + 2, device=f0.device, dtype=torch.float64)
        step = (
            (f0[:, None].double() * harmonic[:, None] / self.config.sample_rate) % 1 * hop
        )  # (B, H, T) cycles per frame
        middle = (step.cumsum(dim=2) % 1).float()
        # Segment j is between the middles of frames j-1 and j; phase is constant in the first and the last.
        start = torch.cat([middle[..., :1], middle], dim=2)[..., None]  # (B, H, T+1, 1)
        slope = nn.functional.pad(step[..., 1:].float(), (1, 1))[..., None]
        # The middle of a frame is a sample if the hop is odd, and lies between two samples if it is even.
        ramp = (torch.arange(hop, device=f0.device) + 0.5 * (1 - hop % 2)) / hop
        phase = (start + slope * ramp).flatten(2)  # (B, H, (T+1)*hop)
        first = hop - hop // 2
        return phase[..., first : first + f0.shape[1] * hop].transpose(1, 2)  # (B, H, T*hop) -> (B, T*hop, H)
