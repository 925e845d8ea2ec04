"""HiFT, the vocoder of both stacks: log mel -> waveform by a harmonic source, convolutions and an inverse STFT.

HiFT-Net (Li et al., arXiv:2309.09493) as CosyVoice2 has it, in its `hift.pt`. Inference only.
"""

from common.hift.checkpoint import fuse_weight_norm, load_hift, split_weight_norm
from common.hift.config import HiFTConfig
from common.hift.generator import HiFTGenerator

__all__ = ["HiFTConfig", "HiFTGenerator", "fuse_weight_norm", "load_hift", "split_weight_norm"]
