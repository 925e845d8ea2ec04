"""Speech tokens to mel: the token encoder, the two estimators (UNet and DiT), and the flows that combine them.

These modules hold the weights and the plain definition of each network. How streams are served (windows, caches, fused
solves, CUDA graphs) is in `common.token2wav`.
"""

from common.flow.cache import EstimatorCache, KeyValues
from common.flow.checkpoint import load_dit_flow, load_unet_flow
from common.flow.config import DiTConfig, DiTFlowConfig, EncoderConfig, UNetConfig, UNetFlowConfig
from common.flow.dit import DiTFlow
from common.flow.unet import UNetFlow

__all__ = [
    "DiTConfig",
    "DiTFlow",
    "DiTFlowConfig",
    "EncoderConfig",
    "EstimatorCache",
    "KeyValues",
    "UNetConfig",
    "UNetFlow",
    "UNetFlowConfig",
    "load_dit_flow",
    "load_unet_flow",
]
