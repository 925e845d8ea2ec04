"""F0 predictor: fundamental frequency (pitch) of each mel frame. Upstream's `ConvRNNF0Predictor`, which has no RNN."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def silenced(x: Tensor, lengths: Tensor | None) -> Tensor:
    """x (B, ..., T) with zeros after each row's length (B,), which is what a convolution's zero padding would be."""
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
        for width in (mel_bins, *[channels] * 4):
            layers += [nn.Conv1d(width, channels, kernel_size=3, padding=1), nn.ELU()]
        self.condnet = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, 1)

    def forward(self, mel: Tensor, frames: Tensor | None = None) -> Tensor:
        """(B, mel_bins, T) -> f0 (B, T) in Hz, never negative. frames (B,): length of each row, if rows are padded."""
        # The linear layer runs as a convolution of kernel size 1, so that one switch disables TF32 for all layers.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), torch.autocast(mel.device.type, enabled=False):
            hidden = mel.float()
            for layer in self.condnet:
                hidden = layer(silenced(hidden, frames) if isinstance(layer, nn.Conv1d) else hidden)
            f0 = F.conv1d(hidden, self.classifier.weight[..., None], self.classifier.bias)
        return f0.squeeze(1).abs()  # (B, 1, T) -> (B, T)
