"""What the networks read of a waveform: resampled samples, mel, filter bank.

Values equal those of the libraries that the networks were trained with: torchaudio's resampling, Matcha's mel
spectrogram, Whisper's log mel, Kaldi's filter bank.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cosyvoice_triton.constants import HOP_SAMPLES, MEL_BINS, PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.voice.audio import sinc_kernel

_MEL_FLOOR = 1e-5


def resample(wav: Tensor, from_rate: int, to_rate: int) -> Tensor:
    """Return (..., N) as (..., ceil(N * to_rate / from_rate)), with the values of torchaudio's Resample by default."""
    if from_rate == to_rate:
        return wav
    divisor = math.gcd(from_rate, to_rate)
    source, target = from_rate // divisor, to_rate // divisor
    kernel = _resampling_kernel(source, target, wav.device)
    margin = (kernel.shape[2] - source) // 2
    flat = wav.reshape(-1, 1, wav.shape[-1])
    phases = F.conv1d(F.pad(flat, (margin, margin + source)), kernel, stride=source)  # (B, target, frames)
    samples = phases.transpose(1, 2).reshape(*wav.shape[:-1], -1)  # (B, target, frames) -> (..., frames * target)
    return samples[..., : math.ceil(target * wav.shape[-1] / source)]


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # kept for later callers: an inference tensor cannot be used in training
def _resampling_kernel(source: int, target: int, device: torch.device) -> Tensor:
    """Return the filters of `resample` (target, 1, taps) on a device."""
    return torch.from_numpy(sinc_kernel(source, target))[:, None].to(device)


@dataclass(frozen=True)
class MelConfig:
    """Sizes in samples, frequency range of the filters in Hz. The defaults are those of the flow's features."""

    sample_rate: int = SAMPLE_RATE
    n_fft: int = 4 * HOP_SAMPLES
    window: int = 4 * HOP_SAMPLES
    hop: int = HOP_SAMPLES
    bins: int = MEL_BINS
    min_hz: float = 0
    max_hz: float = 8000


@lru_cache(maxsize=4)
@torch.inference_mode(False)  # kept for later callers: an inference tensor cannot be used in training
def _mel_basis(config: MelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return Slaney mel filters (bins, n_fft // 2 + 1) and the Hann window, on a device."""
    from transformers.audio_utils import mel_filter_bank  # takes half a second and few processes need it

    filters = mel_filter_bank(
        config.n_fft // 2 + 1,
        config.bins,
        config.min_hz,
        config.max_hz,
        config.sample_rate,
        norm="slaney",
        mel_scale="slaney",
    )
    return torch.from_numpy(filters.T.copy()).float().to(device), torch.hann_window(config.window, device=device)


def mel_spectrogram(wav: Tensor, config: MelConfig | None = None) -> Tensor:
    """Return a 24 kHz wave (B, N) as log mel (B, 80, N // HOP_SAMPLES), the flow's features; `config` for others.

    ValueError if the wave is too short for reflection padding.
    """
    config = config or MelConfig()
    margin = (config.n_fft - config.hop) // 2
    if wav.shape[-1] <= margin:
        raise ValueError(f"a wave of {wav.shape[-1]} samples has no mel spectrogram: expected more than {margin}")
    filters, window = _mel_basis(config, wav.device)
    padded = F.pad(wav, (margin, margin), mode="reflect")
    spectrum = torch.stft(
        padded, config.n_fft, config.hop, config.window, window=window, center=False, return_complex=True
    )
    magnitude = torch.sqrt(spectrum.real.square() + spectrum.imag.square() + 1e-9)  # (B, bins, T)
    return torch.log((filters @ magnitude).clamp(min=_MEL_FLOOR))


def log_mel(wav: Tensor) -> Tensor:
    """Return 16 kHz waves (..., N) as Whisper's log mel (..., 128, N // 160), what the speech tokenizer reads."""
    config = MelConfig(sample_rate=PROMPT_SAMPLE_RATE, n_fft=400, window=400, hop=160, bins=128)
    filters, window = _mel_basis(config, wav.device)
    spectrum = torch.stft(wav, config.n_fft, config.hop, window=window, return_complex=True)[..., :-1]
    bands = (filters @ spectrum.abs().square()).clamp(min=1e-10).log10()
    floor = bands.amax((-2, -1), keepdim=True) - 8  # 80 dB below the loudest
    return (bands.maximum(floor) + 4) / 4


def fbank(wav: Tensor, *, mean_normalised: bool = False) -> Tensor:
    """Return a 16 kHz wave (N,) as Kaldi log filter bank (T, 80), 25 ms windows every 10 ms, no dither.

    mean_normalised: subtract each band's mean over time, as CAM++ expects.
    """
    import kaldi_native_fbank as knf  # here: clients read and write files without it

    options = knf.FbankOptions()
    options.frame_opts.samp_freq = PROMPT_SAMPLE_RATE
    options.frame_opts.dither = 0.0
    options.mel_opts.num_bins = MEL_BINS
    extractor = knf.OnlineFbank(options)
    extractor.accept_waveform(PROMPT_SAMPLE_RATE, wav.cpu().numpy())
    extractor.input_finished()
    frames = [extractor.get_frame(index) for index in range(extractor.num_frames_ready)]
    if not frames:
        raise ValueError(f"a wave of {wav.shape[-1]} samples is shorter than one filter bank window")
    features = torch.from_numpy(np.stack(frames))
    return features - features.mean(dim=0) if mean_normalised else features
