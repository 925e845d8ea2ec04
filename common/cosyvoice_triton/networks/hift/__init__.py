"""HiFT, the vocoders: log mel -> waveform by a harmonic source, convolutions and an inverse STFT.

HiFT-Net (Li et al., arXiv:2309.09493) as CosyVoice2 has it in its `hift.pt`, and of causal convolutions as CosyVoice3
has it. Inference only.
"""

from cosyvoice_triton.networks.hift.causal import CausalHiFTGenerator
from cosyvoice_triton.networks.hift.checkpoint import (
    build_causal_hift,
    fuse_weight_norm,
    load_causal_hift,
    load_hift,
    split_weight_norm,
)
from cosyvoice_triton.networks.hift.config import HiFTConfig
from cosyvoice_triton.networks.hift.generator import HiFTGenerator
