"""F0 predictor: fundamental frequency (pitch) of each mel frame. Upstream's `ConvRNNF0Predictor`, which has no RNN."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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

        def inside(x: Tensor) -> Tensor:
            return x if outside is None else x.masked_fill(outside, 0)

        # The linear layer runs as a convolution of kernel size 1, so that one switch disables TF32 for all layers.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), torch.autocast(mel.device.type, enabled=False):
            hidden = mel.float()
            for layer in self.condnet:
                hidden = layer(inside(hidden) if isinstance(layer, nn.Conv1d) else hidden)
            f0 = F.conv1d(hidden, self.classifier.weight[..., None], self.classifier.bias)
        return inside(f0.abs()).squeeze(1)  # (B, 1, T) -> (B, T)
