"""Features of batches on any device, equal to those that serving computes per recording; perturbation of speech."""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from cosyvoice_triton.constants import MEL_BINS, PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.voice.features import resample
from torch import Tensor

_KALDI_WINDOW, _KALDI_HOP, _KALDI_FFT = 400, 160, 512
_KALDI_LOWEST_HZ, _KALDI_PREEMPHASIS = 20.0, 0.97

SLOWEST, FASTEST = 0.85, 1.2
QUIETEST, LOUDEST = math.log(0.1), math.log(1.6)
NOISY = 0.4  # share of rows
TONE_DB = 8.0  # largest gain of a random curve over frequency


def kaldi_fbank(wave: Tensor) -> Tensor:
    """wave (B, N) at 16 kHz -> (B, T, 80): `features.fbank` minus each band's mean over time, the input of CAM++."""
    filters, window = _kaldi_filters(wave.device)
    frames = wave.unfold(1, _KALDI_WINDOW, _KALDI_HOP)
    frames = frames - frames.mean(-1, keepdim=True)
    before = torch.cat([frames[..., :1], frames[..., :-1]], dim=-1)
    power = torch.fft.rfft((frames - _KALDI_PREEMPHASIS * before) * window, _KALDI_FFT).abs().square()
    energies = (power[..., :-1] @ filters).clamp(min=torch.finfo(torch.float32).eps).log()
    return energies - energies.mean(1, keepdim=True)


@lru_cache(maxsize=2)
@torch.inference_mode(False)  # kept for later callers: an inference tensor cannot be used in training
def _kaldi_filters(device: torch.device) -> tuple[Tensor, Tensor]:
    """Triangular filters on Kaldi's mel scale (256, 80), and Kaldi's window, a Hann window to the power of 0.85."""

    def mel(hz: Tensor) -> Tensor:
        return 1127.0 * torch.log(1.0 + hz / 700.0)

    ends = mel(torch.tensor([_KALDI_LOWEST_HZ, PROMPT_SAMPLE_RATE / 2], dtype=torch.float64))
    points = torch.linspace(float(ends[0]), float(ends[1]), MEL_BINS + 2, dtype=torch.float64)
    bins = mel(torch.arange(_KALDI_FFT // 2, dtype=torch.float64) * PROMPT_SAMPLE_RATE / _KALDI_FFT)[:, None]
    rise = (bins - points[:-2]) / (points[1:-1] - points[:-2])
    fall = (points[2:] - bins) / (points[2:] - points[1:-1])
    filters = torch.minimum(rise, fall).clamp(min=0)
    window = torch.hann_window(_KALDI_WINDOW, periodic=False, dtype=torch.float64).pow(0.85)
    return filters.float().to(device), window.float().to(device)


def upsampled(wave: Tensor) -> Tensor:
    """(B, N) at 16 kHz -> (B, 1.5 N) at 24 kHz, as a prompt's recording is resampled.

    Without TF32, whose rounding is audible noise between 8 and 12 kHz, where the signal has no energy.
    """
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return resample(wave, PROMPT_SAMPLE_RATE, SAMPLE_RATE)


def at_speed(wave: Tensor, samples: int) -> Tensor:
    """Waves (B, M) resampled to (B, samples), which changes speed and pitch. Band-limited, in the frequency domain."""
    spectrum = torch.fft.rfft(wave)
    bins = samples // 2 + 1
    kept = F.pad(spectrum, (0, max(0, bins - spectrum.shape[1])))[:, :bins]
    return torch.fft.irfft(kept, samples) * (samples / wave.shape[1])


def as_recorded(wave: Tensor) -> Tensor:
    """Waves (B, N) with random gain, frequency response and noise per row, like other microphones and rooms."""
    B, N = wave.shape

    def between(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(B, 1, device=wave.device)

    spectrum = torch.fft.rfft(wave)
    along = torch.linspace(-1, 1, spectrum.shape[1], device=wave.device)
    curve = between(-1, 1) * along + between(-0.5, 0.5) * torch.cos(math.pi * along * between(1, 3))
    coloured = torch.fft.irfft(spectrum * 10 ** (TONE_DB / 20 * curve), N)
    noise = torch.fft.rfft(torch.randn_like(wave)) * (along + 1.02) ** -between(0, 0.5)  # white to pink
    noise = torch.fft.irfft(noise, N)
    level = coloured.std(1, keepdim=True) / noise.std(1, keepdim=True) * 10 ** (-between(12, 40) / 20)
    noisy = coloured + noise * level * (torch.rand(B, 1, device=wave.device) < NOISY)
    return noisy * between(QUIETEST, LOUDEST).exp()
