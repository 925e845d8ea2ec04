"""Fundamental frequency of speech by autocorrelation, for many waves at once on a GPU."""

import torch
import torch.nn.functional as F
from cosyvoice_triton.constants import HOP_SAMPLES, SAMPLE_RATE
from torch import Tensor

LOWEST, HIGHEST = 70.0, 500.0  # Hz
WINDOW = 3 * HOP_SAMPLES  # 60 ms: four periods of the lowest voice
TRANSFORM = 4096  # holds a window and its lags
VOICED = 0.45  # least normalised autocorrelation at the period
LONG_LAG_LOSS = 0.06  # penalty of long lags, so that one period wins over several
QUIETEST = 3e-3  # least root mean square of a voiced frame


def fundamental(wave: Tensor) -> Tensor:
    """24 kHz waves (B, N) -> f0 in Hz (B, N // HOP_SAMPLES), 0 if unvoiced; frames are aligned with the mel's."""
    margin = (WINDOW - HOP_SAMPLES) // 2
    frames = F.pad(wave, (margin, margin)).unfold(1, WINDOW, HOP_SAMPLES)  # (B, T, WINDOW)
    frames = frames - frames.mean(-1, keepdim=True)
    window = torch.hann_window(WINDOW, device=wave.device)
    power = _autocorrelation(frames * window)
    shape = _autocorrelation(window)
    shortest, longest = int(SAMPLE_RATE / HIGHEST), int(SAMPLE_RATE / LOWEST)
    # Divided by the window's own autocorrelation, which falls with the lag.
    likeness = power / (power[..., :1] + 1e-6) / (shape / shape[0])
    likeness = likeness[..., : longest + 2] * (
        1 - LONG_LAG_LOSS * torch.linspace(0, 1, longest + 2, device=wave.device)
    )
    height, lag = likeness[..., shortest : longest + 1].max(-1)
    lag = lag + shortest
    before, at, after = (likeness.gather(-1, (lag + step)[..., None])[..., 0] for step in (-1, 0, 1))
    curvature = (2 * at - before - after).clamp(min=1e-6)
    peak = lag + (0.5 * (after - before) / curvature).clamp(-0.5, 0.5)  # peak of the parabola through the three
    loud = power[..., 0] > WINDOW * window.square().mean() * QUIETEST**2
    f0 = torch.where((height > VOICED) & loud, SAMPLE_RATE / peak, 0.0)
    return F.pad(f0, (1, 1)).unfold(1, 3, 1).median(-1).values  # removes errors of single frames


def _autocorrelation(x: Tensor) -> Tensor:
    """(..., WINDOW) -> (..., TRANSFORM) by lag, the second half being negative lags."""
    return torch.fft.irfft(torch.fft.rfft(x, TRANSFORM).abs().square(), TRANSFORM)
