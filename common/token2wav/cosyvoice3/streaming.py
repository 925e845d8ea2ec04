"""CosyVoice3's flow over many streams.

Caches would take 1.8 MB per frame (22 transformer blocks, 10 Euler steps, guidance, float16). The window's frames have
the positions that they would have in a shorter utterance: the prompt's, then the recent ones without a gap.
"""

from pathlib import Path
from typing import Any

from common.flow.checkpoint import load_cosyvoice3_flow
from common.token2wav.limits import COSYVOICE3_BATCH_TOKENS, COSYVOICE3_FRAMES
from common.token2wav.noise import flow_noise
from common.token2wav.streaming import FlowOptions
from common.token2wav.window.graphs import FusedEstimator
from common.token2wav.window.streaming import WindowStreaming


def load(path: Path, options: FlowOptions) -> "CosyVoice3Streaming":
    """Load the flow of a `flow.pt`. ValueError names what does not fit, or a runtime that the flow does not have."""
    network, shared = options.load(load_cosyvoice3_flow, path)
    return CosyVoice3Streaming(network, flow_noise(options.device), **shared)


class CosyVoice3Streaming(WindowStreaming):
    batch_tokens = COSYVOICE3_BATCH_TOKENS
    graph_frames = COSYVOICE3_FRAMES

    def _fused(self, estimator: Any, times: list[float]) -> FusedEstimator:
        from common.token2wav.cosyvoice3.fused import FusedRotaryDiT  # its kernels need Triton

        return FusedRotaryDiT(estimator, times)
