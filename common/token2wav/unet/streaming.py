"""CosyVoice2's flow over many streams.

Caches would take 2.3 MB per frame (56 transformer blocks, 10 Euler steps, guidance, float16), which would limit streams
to a few seconds of context.
"""

from pathlib import Path
from typing import Any

from common.flow.checkpoint import load_unet_flow
from common.flow.unet import UNetEstimator, UNetFlow
from common.token2wav.limits import UNET_BATCH_TOKENS
from common.token2wav.noise import NoiseTape, flow_noise
from common.token2wav.streaming import FlowOptions
from common.token2wav.window.streaming import WindowStreaming


def load(path: Path, options: FlowOptions) -> "UNetStreaming":
    """Load the flow of a `flow.pt`, and the runtime's files next to it. ValueError names what does not fit."""
    network, shared = options.load(load_unet_flow, path)
    return UNetStreaming(network, flow_noise(options.device), **shared)


class UNetStreaming(WindowStreaming):
    """On a GPU with `graphs`, the solve is one of fused kernels."""

    batch_tokens = UNET_BATCH_TOKENS

    def __init__(self, network: UNetFlow, noise: NoiseTape, *, graphs: bool = True, **options: Any):
        super().__init__(network, noise, graphs=graphs, **options)
        ours = isinstance(network.decoder.estimator, UNetEstimator)
        if graphs and ours and network.spk_embed_affine_layer.weight.is_cuda:
            from common.token2wav.unet.graphs import GraphedUNetSolve  # its kernels need Triton

            self._solve = GraphedUNetSolve(network, noise, self.limits, self._steps)
