"""Speech tokens to mel: the token encoders, the estimators (UNet and two DiTs), and the flows that combine
them.

These modules hold the weights and the plain definition of each network. How streams are served (windows, caches, fused
solves, CUDA graphs) is in `common.token2wav`.
"""

from common.flow.cache import EstimatorCache, KeyValues
from common.flow.checkpoint import load_cosyvoice3_flow, load_dit_flow, load_unet_flow
from common.flow.config import (
    CosyVoice3FlowConfig,
    DiTConfig,
    DiTFlowConfig,
    EncoderConfig,
    LookaheadConfig,
    RotaryDiTConfig,
    UNetConfig,
    UNetFlowConfig,
)
from common.flow.cosyvoice3 import CosyVoice3Flow
from common.flow.dit import DiTFlow
from common.flow.unet import UNetFlow

__all__ = [
    "CosyVoice3Flow",
    "CosyVoice3FlowConfig",
    "DiTConfig",
    "DiTFlow",
    "DiTFlowConfig",
    "EncoderConfig",
    "EstimatorCache",
    "KeyValues",
    "LookaheadConfig",
    "RotaryDiTConfig",
    "UNetConfig",
    "UNetFlow",
    "UNetFlowConfig",
    "load_cosyvoice3_flow",
    "load_dit_flow",
    "load_unet_flow",
]
