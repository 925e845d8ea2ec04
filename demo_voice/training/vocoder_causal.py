"""Stage `vocoder_causal`: CosyVoice3's HiFT, of mel up to 12 kHz.

A crop is a whole stream: it begins without a past, and its last frames have no frames ahead of them, as at the end of
an utterance.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import HOP_SAMPLES
from cosyvoice_triton.networks.hift import CausalHiFTGenerator, HiFTConfig
from cosyvoice_triton.networks.hift.causal import F0_LOOKAHEAD, PRE_LOOKAHEAD, Contexts
from torch import Tensor

from demo_voice.training import vocoder
from demo_voice.training.dataset import SpeechDataset
from demo_voice.training.training import prepare


class _Crop(Contexts):
    """The contexts of a crop, of which nothing is kept."""

    def __init__(self) -> None:
        super().__init__(past=None)

    def extend(self, x: Tensor, ends: Tensor, reach: int, zeros: int) -> Tensor:
        return F.pad(x, (zeros, 0))


def network(config: HiFTConfig) -> CausalHiFTGenerator:
    """The f0 predictor is trained in float32 and served in float64."""
    hift = CausalHiFTGenerator(config)
    hift.f0_predictor.float()
    return hift


def pitch(hift: CausalHiFTGenerator, mel: Tensor) -> Tensor:
    """Predict f0 (B, T) in Hz, with gradients, without TF32; mel (B, 80, T)."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return hift.f0_predictor(F.pad(mel, (0, F0_LOOKAHEAD)), _lengths(mel), _Crop())


def render(hift: CausalHiFTGenerator, mel: Tensor, f0: Tensor) -> Tensor:
    """mel (B, 80, T), f0 (B, T) in Hz -> waves (B, N), as `vocoder.render`."""
    frames = _lengths(mel)
    noise = torch.rand(*f0.shape[:1], f0.shape[1] * HOP_SAMPLES, hift.config.harmonics + 1, device=f0.device)
    source, _ = hift.m_source(f0, noise)
    ends = torch.ones_like(frames, dtype=torch.bool)
    return hift.decode(F.pad(mel, (0, PRE_LOOKAHEAD)), source, frames, ends, _Crop(), begins=True)


def _lengths(mel: Tensor) -> Tensor:
    return torch.full((len(mel),), mel.shape[2], device=mel.device)


CAUSAL = vocoder.Vocoder("hift_causal.pt", network, pitch, render, stacks.COSYVOICE3.mel_max_hz)


def train(work: Path, seconds: float, device: str | torch.device) -> None:
    vocoder.fit(CAUSAL, work, SpeechDataset.load(work, prepare(device, seed=7)), seconds)
