"""Short-time Fourier transforms of the vocoders: the source's, and the inverse that makes the audio."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from cosyvoice_triton.networks.hift.f0 import silenced

_MAX_LOG_MAGNITUDE = math.log(100.0)  # of one STFT bin


def stft(wave: Tensor, window: Tensor, hop: int, *, center: bool = True) -> Tensor:
    """Transform wave (B, N) -> (B, n_fft + 2, N / hop + 1): real parts, then imaginary parts.

    Without `center` the first column begins at the first sample and the last one ends at the last:
    (N - n_fft) / hop + 1 columns.
    """
    spectrum = torch.stft(wave, len(window), hop, window=window, center=center, return_complex=True)
    return torch.cat([spectrum.real, spectrum.imag], dim=1)


def istft(x: Tensor, window: Tensor, hop: int, bins: Tensor | None) -> Tensor:
    """Transform (B, n_fft + 2, T), log magnitudes, then values whose sines are the phases -> (B, (T - 1) * hop).

    bins (B,): number of valid frames of each row. torch.istft is not used because it checks the sum of its windows on
    the host, which a CUDA graph cannot capture.
    """
    n_fft = len(window)
    log_magnitude, phase = x.chunk(2, dim=1)
    magnitude = log_magnitude.clamp(max=_MAX_LOG_MAGNITUDE).exp()  # bounded before it can overflow
    frames = torch.fft.irfft(torch.polar(magnitude, phase.sin()), n_fft, dim=1) * window[:, None]  # (B, n_fft, T)
    length = (frames.shape[2] - 1) * hop
    weight = window.square()[None, :, None].expand(1 if bins is None else len(x), -1, frames.shape[2])
    frames, weight = silenced(frames, bins), silenced(weight, bins)
    wave, total = (_overlap_add(part, hop)[:, n_fft // 2 : n_fft // 2 + length] for part in (frames, weight))
    return wave / (total if bins is None else total.clamp(min=1e-8))  # after a row's end the sum is 0


def _overlap_add(frames: Tensor, hop: int) -> Tensor:
    """Add overlapping frames: (B, n_fft, T) -> (B, (T - 1) * hop + n_fft)."""
    _, n_fft, T = frames.shape
    length = (T - 1) * hop + n_fft
    return F.fold(frames, (1, length), (1, n_fft), stride=(1, hop)).flatten(1)
