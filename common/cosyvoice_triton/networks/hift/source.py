"""Pitch of each mel frame, and the harmonic source that follows it: the excitation signal that the generator's
convolutions filter into speech.

The neural source-filter model's source module (Wang et al., arXiv:1904.12088); upstream's `ConvRNNF0Predictor`, which
has no RNN, and `SourceModuleHnNSF2`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosyvoice_triton.networks.hift.config import HiFTConfig

F0_REACH = 5  # mel frames on each side that a frame's f0 depends on: one per convolution


def silenced(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return x (B, ..., T) with zeros after each row's length (B,), as a convolution's zero padding would be."""
    if lengths is None:
        return x
    outside = torch.arange(x.shape[-1], device=x.device) >= lengths[:, None]  # (B, T)
    return x.masked_fill(outside.view(len(x), *[1] * (x.ndim - 2), -1), 0)


class F0Predictor(nn.Module):
    """Five convolutions over time and a linear layer: log mel -> f0 in Hz. Keys `f0_predictor.*` of `hift.pt`.

    Always computed in float32 without TF32: an error in f0 is integrated into the phase of the source, where it grows
    with every sample and with the number of the harmonic.
    """

    def __init__(self, mel_bins: int, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in (mel_bins, *[channels] * (F0_REACH - 1)):
            layers += [nn.Conv1d(width, channels, kernel_size=3, padding=1), nn.ELU()]
        self.condnet = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, 1)

    def forward(self, mel: Tensor, ends: Tensor | None = None, begins: Tensor | None = None) -> Tensor:
        """Predict f0 (B, T) in Hz, never negative, from mel (B, mel_bins, T).

        ends (B,): each row is computed as if it ended there, and is zero after it. begins (B,): the same where it
        begins; it needs `ends`.
        """
        outside = None
        if ends is not None:
            index = torch.arange(mel.shape[2], device=mel.device)
            outside = index >= ends[:, None]  # (B, T)
            if begins is not None:
                outside |= index < begins[:, None]
            outside = outside[:, None]

        # The linear layer runs as a convolution of kernel size 1, so that one switch disables TF32 for all layers.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), torch.autocast(mel.device.type, enabled=False):
            hidden = mel.float()
            for layer in self.condnet:
                if outside is not None and isinstance(layer, nn.Conv1d):
                    hidden = hidden.masked_fill(outside, 0)
                hidden = layer(hidden)
            f0 = F.conv1d(hidden, self.classifier.weight[..., None], self.classifier.bias).abs()
        return (f0 if outside is None else f0.masked_fill(outside, 0)).squeeze(1)  # (B, 1, T) -> (B, T)


class HarmonicSource(nn.Module):
    """Sines at f0 and its overtones with added noise, mixed by a learned linear layer. Keys `m_source.*`.

    The noise is passed in, so that a stream is reproducible and does not depend on the other rows of a batch. Upstream
    also draws an initial phase per harmonic that its interpolation never reads; it is omitted.
    """

    def __init__(self, config: HiFTConfig, *, held: bool = False) -> None:
        """Make the source. held: the phase is constant within a frame, as in CosyVoice3, else linear between frames."""
        super().__init__()
        self.config = config
        self._held = held
        self.l_linear = nn.Linear(config.harmonics + 1, 1)

    def forward(self, f0: Tensor, noise: Tensor, carried: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Make the source (B, 1, T*hop) in -1..1 from f0 (B, T) in Hz and noise (B, T*hop, harmonics+1); return it and
        the phases (B, harmonics+1, T) at the middles of the frames, in cycles.

        carried (B, harmonics+1): the phases at the middle of the frame before the first one, which the source then
        continues; without it, the first frame begins a recording.
        """
        waves, middles = self.sines(f0, noise, carried)
        return torch.tanh(self.l_linear(waves)).transpose(1, 2), middles  # (B, T*hop, 1) -> (B, 1, T*hop)

    def sines(self, f0: Tensor, noise: Tensor, carried: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the harmonics before they are mixed, (B, T*hop, harmonics+1), noise alone in unvoiced frames, and the
        phases."""
        config = self.config
        voiced = (f0 > config.voiced_threshold).repeat_interleave(config.hop, dim=1)[..., None]  # (B, T*hop, 1)
        phase, middles = self._phase(f0, carried)
        waves = config.sine_amplitude * torch.sin(2 * math.pi * phase)
        deviation = torch.where(voiced, config.noise_deviation, config.sine_amplitude / 3)
        return torch.where(voiced, waves, 0.0) + deviation * noise, middles

    def _phase(self, f0: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the phase of every harmonic from f0 (B, T) in Hz: at every sample, (B, T*hop, harmonics+1), and at
        the middles of frames, (B, harmonics+1, T), in cycles.

        As in upstream, phase is summed per frame; the sum is the phase at the middle of the frame, and phase is linear
        between middles and constant before the first and after the last. The sum is in float64 and drops whole cycles,
        so that a sample of a long recording is as exact as one of the first frame.
        """
        hop = self.config.hop
        harmonic = torch.arange(1, self.config.harmonics + 2, device=f0.device, dtype=torch.float64)
        step = (
            (f0[:, None].double() * harmonic[:, None] / self.config.sample_rate) % 1 * hop
        )  # (B, H, T) cycles per frame
        total = step.cumsum(dim=2)
        if self._held:
            middles = (total if carried is None else carried[..., None] + total) % 1
            return middles.float().repeat_interleave(hop, dim=2).transpose(
                1, 2
            ), middles  # (B, H, T*hop) -> (B, T*hop, H)
        if carried is None:
            middles = total % 1
            first, slope = middles[..., :1], nn.functional.pad(step[..., 1:], (1, 1))
        else:
            first = carried[..., None]
            middles, slope = (first + total) % 1, nn.functional.pad(step, (0, 1))
        # Segment j is between the middles of frames j-1 and j; phase is constant in the last, and in that of a
        # recording's first frame.
        start = torch.cat([first, middles], dim=2).float()[..., None]  # (B, H, T+1, 1)
        # The middle of a frame is a sample if the hop is odd, and lies between two samples if it is even.
        ramp = (torch.arange(hop, device=f0.device) + 0.5 * (1 - hop % 2)) / hop
        phase = (start + slope.float()[..., None] * ramp).flatten(2)  # (B, H, (T+1)*hop)
        begin = hop - hop // 2
        phase = phase[..., begin : begin + f0.shape[1] * hop].transpose(1, 2)  # (B, H, T*hop) -> (B, T*hop, H)
        return phase, middles
