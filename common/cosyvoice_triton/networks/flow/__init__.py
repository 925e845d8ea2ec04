"""Speech tokens to mel: the token encoders, the estimators (UNet and two DiTs), and the flows that combine
them.

These modules hold the weights and the plain definition of each network. How streams are served (windows, caches, fused
solves, CUDA graphs) is in `cosyvoice_triton.token2wav`.
"""

from cosyvoice_triton.networks.flow.cache import EstimatorCache, KeyValues
from cosyvoice_triton.networks.flow.checkpoint import load_cosyvoice3_flow, load_dit_flow, load_unet_flow
from cosyvoice_triton.networks.flow.config import (
    CosyVoice3FlowConfig,
    DiTConfig,
    DiTFlowConfig,
    EncoderConfig,
    LookaheadConfig,
    RotaryDiTConfig,
    UNetConfig,
    UNetFlowConfig,
)
from cosyvoice_triton.networks.flow.cosyvoice3 import CosyVoice3Flow
from cosyvoice_triton.networks.flow.dit import DiTFlow
from cosyvoice_triton.networks.flow.unet import UNetFlow
