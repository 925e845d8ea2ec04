"""Features of batches on any device, equal to those that serving computes per recording; perturbation of speech."""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from cosyvoice_triton.constants import MEL_BINS, PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.voice.features import resample
from torch import Tensor
from transformers.audio_utils import mel_filter_bank, window_function

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
    energies = (power @ filters).clamp(min=torch.finfo(torch.float32).eps).log()
    return energies - energies.mean(1, keepdim=True)


@lru_cache(maxsize=2)
@torch.inference_mode(False)  # kept for later callers: an inference tensor cannot be used in training
def _kaldi_filters(device: torch.device) -> tuple[Tensor, Tensor]:
    """Kaldi's mel filters (257, 80) and window."""
    filters = mel_filter_bank(
        _KALDI_FFT // 2 + 1,
        MEL_BINS,
        _KALDI_LOWEST_HZ,
        PROMPT_SAMPLE_RATE / 2,
        PROMPT_SAMPLE_RATE,
        mel_scale="kaldi",
        triangularize_in_mel_space=True,
    )
    window = window_function(_KALDI_WINDOW, "povey", periodic=False)
    return torch.from_numpy(filters).float().to(device), torch.from_numpy(window).float().to(device)


def recorded(wave: Tensor) -> Tensor:
    """(B, N) at 24 kHz -> (B, N / 1.5) at 16 kHz, the rate of prompts, tokenizer and speaker encoder."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # its rounding is audible noise
        return resample(wave, SAMPLE_RATE, PROMPT_SAMPLE_RATE)


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
