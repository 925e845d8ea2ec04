"""HiFT: mel spectrogram -> waveform, by a harmonic source, convolutions and an inverse STFT."""

from common.hift.checkpoint import fuse_weight_norm, load_hift, split_weight_norm
from common.hift.config import HiFTConfig
from common.hift.generator import HiFTGenerator

__all__ = ["HiFTConfig", "HiFTGenerator", "fuse_weight_norm", "load_hift", "split_weight_norm"]
