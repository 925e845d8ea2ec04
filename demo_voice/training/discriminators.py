"""Discriminators for training the vocoder: of spectrograms, and of waves folded at a period. Both small."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

RESOLUTIONS = (512, 1024, 2048)
PERIODS = (2, 3, 5, 7, 11)
SPECTRUM_CHANNELS = 24
PERIOD_CHANNELS = (16, 64, 128, 128)
SLOPE = 0.1

Scores = tuple[Tensor, list[Tensor]]  # scores, near 1 for real speech, and the features of each layer


class SpectrogramDiscriminator(nn.Module):
    """2-D convolutions over the magnitude spectrogram of one resolution."""

    window: Tensor

    def __init__(self, n_fft: int) -> None:
        super().__init__()
        C = SPECTRUM_CHANNELS
        shapes = [(1, (3, 9), (1, 1)), (C, (3, 9), (1, 2)), (C, (3, 9), (1, 2)), (C, (3, 3), (1, 1))]
        self.layers = nn.ModuleList(
            weight_norm(nn.Conv2d(channels, C, kernel, stride, (kernel[0] // 2, kernel[1] // 2)))
            for channels, kernel, stride in shapes
        )
        self.score = weight_norm(nn.Conv2d(C, 1, 3, padding=1))
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)
        self.n_fft = n_fft

    def forward(self, wave: Tensor) -> Scores:
        """wave (B, N)"""
        spectrum = torch.stft(wave, self.n_fft, self.n_fft // 4, window=self.window, return_complex=True)
        x = spectrum.abs().clamp(min=1e-5).sqrt().transpose(1, 2)[:, None]  # (B, bins, T) -> (B, 1, T, bins)
        return _score(self.layers, self.score, x)


class PeriodDiscriminator(nn.Module):
    """HiFi-GAN's multi-period discriminator, of one period (Kong et al., arXiv:2010.05646)."""

    def __init__(self, period: int) -> None:
        super().__init__()
        widths = (1, *PERIOD_CHANNELS)
        self.layers = nn.ModuleList(
            weight_norm(nn.Conv2d(before, after, (5, 1), (3, 1), (2, 0)))
            for before, after in zip(widths[:-1], widths[1:], strict=True)
        )
        self.score = weight_norm(nn.Conv2d(widths[-1], 1, (3, 1), padding=(1, 0)))
        self.period = period

    def forward(self, wave: Tensor) -> Scores:
        """wave (B, N)"""
        whole = wave.shape[1] // self.period * self.period
        x = wave[:, :whole].unflatten(1, (-1, self.period))[:, None]  # (B, N) -> (B, 1, N / period, period)
        return _score(self.layers, self.score, x)


def _score(layers: nn.ModuleList, score: nn.Module, x: Tensor) -> Scores:
    features = []
    for layer in layers:
        x = F.leaky_relu(layer(x), SLOPE)
        features.append(x)
    return score(x), features


class Discriminators(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__([*map(SpectrogramDiscriminator, RESOLUTIONS), *map(PeriodDiscriminator, PERIODS)])

    def losses(self, real: Tensor, made: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Least-squares loss of the discriminators; adversarial loss and feature matching loss of the generator.

        Waves (B, N). All are of the same scores, for which the networks run once: the first loss is for the gradients
        of the discriminators' weights, the others for those of `made`.
        """
        loss, adversarial, matching = (made.new_zeros(()) for _ in range(3))
        for discriminator in self:
            scores, features = discriminator(torch.cat([real, made]))
            of_real, of_made = scores.chunk(2)
            loss = loss + (1 - of_real).square().mean() + of_made.square().mean()
            adversarial = adversarial + (1 - of_made).square().mean()
            for layer in features:
                wanted, found = layer.chunk(2)
                matching = matching + (wanted.detach() - found).abs().mean()
        return loss, adversarial, matching
