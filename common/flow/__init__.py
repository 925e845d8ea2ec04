"""Speech tokens to mel: the encoder, the two estimators, and the flows that solve with them."""

from common.flow.cache import DiTFlowCache, EncoderCache, EstimatorCache, KeyValues
from common.flow.checkpoint import load_dit_flow, load_unet_flow
from common.flow.config import DiTConfig, DiTFlowConfig, EncoderConfig, UNetConfig, UNetFlowConfig
from common.flow.dit_flow import DiTFlow
from common.flow.unet_flow import UNetFlow

__all__ = [
    "DiTConfig",
    "DiTFlow",
    "DiTFlowCache",
    "DiTFlowConfig",
    "EncoderCache",
    "EncoderConfig",
    "EstimatorCache",
    "KeyValues",
    "UNetConfig",
    "UNetFlow",
    "UNetFlowConfig",
    "load_dit_flow",
    "load_unet_flow",
]
