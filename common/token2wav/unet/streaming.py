"""CosyVoice2's flow over many streams.

Caches would take 2.3 MB per frame (56 transformer blocks, 10 Euler steps, guidance, float16), which would limit streams
to a few seconds of context.
"""

from pathlib import Path
from typing import Any

from common.flow.checkpoint import load_unet_flow
from common.token2wav.limits import UNET_BATCH_TOKENS, UNET_FRAMES
from common.token2wav.noise import flow_noise
from common.token2wav.streaming import FlowOptions
from common.token2wav.window.graphs import FusedEstimator
from common.token2wav.window.streaming import WindowStreaming


def load(path: Path, options: FlowOptions) -> "UNetStreaming":
    """Load the flow of a `flow.pt`, and the runtime's files next to it. ValueError names what does not fit."""
    network, shared = options.load(load_unet_flow, path)
    return UNetStreaming(network, flow_noise(options.device), **shared)


class UNetStreaming(WindowStreaming):
    batch_tokens = UNET_BATCH_TOKENS
    graph_frames = UNET_FRAMES

    def _fused(self, estimator: Any, times: list[float]) -> FusedEstimator:
        from common.token2wav.unet.fused import FusedUNet  # its kernels need Triton

        return FusedUNet(estimator, times)
