"""16 kHz speech to the sample rate of the mel, on any device."""

import torch
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.voice import features
from torch import Tensor


def upsampled(wave: Tensor) -> Tensor:
    """(B, N) at 16 kHz -> (B, 1.5 N) at 24 kHz, as a prompt's recording is resampled.

    Without TF32, whose rounding is audible noise between 8 and 12 kHz, where the signal has no energy.
    """
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return features.resample(wave, PROMPT_SAMPLE_RATE, SAMPLE_RATE)
