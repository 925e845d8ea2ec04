"""Random-weight `flow.pt` and `hift.pt` of every stack: networks of the package with official key names.

Weights keep the scale of signals from layer to layer. The few exceptions give the vocoder the pitch and loudness of a
voice, and make voices differ.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.networks import flow
from cosyvoice_triton.networks.flow.checkpoint import with_rotary
from cosyvoice_triton.networks.hift import CausalHiFTGenerator, HiFTConfig, HiFTGenerator, split_weight_norm
from cosyvoice_triton.stacks import Stack
from torch import Tensor, nn

Draw = Callable[[Tensor], Tensor]  # from standard normal noise in the shape of a weight to that weight

# Small sizes; the defaults of the configurations are the official sizes.
ENCODER = flow.EncoderConfig(width=64, heads=2, feed_forward=128, blocks=1, up_blocks=1)
UNET_FLOW = flow.UNetFlowConfig(
    encoder=ENCODER, estimator=flow.UNetConfig(channels=64, heads=1, blocks=1, mid_stages=1)
)
DIT_FLOW = flow.DiTFlowConfig(
    encoder=ENCODER,
    estimator=flow.DiTConfig(width=64, depth=2, heads=2, head_dim=32, feed_forward=128, time_frequencies=64),
)
COSYVOICE3_FLOW = flow.CosyVoice3FlowConfig(
    encoder=flow.LookaheadConfig(hidden=64),
    estimator=flow.RotaryDiTConfig(width=64, depth=2, heads=2, head_dim=32, feed_forward=128, time_frequencies=64),
)
HIFT = HiFTConfig(channels=64, f0_channels=32)
FLOWS: dict[Stack, Callable[[Any], nn.Module]] = {
    stacks.UNET: flow.UNetFlow,
    stacks.DIT: flow.DiTFlow,
    stacks.COSYVOICE3: flow.CosyVoice3Flow,
}

# Hz: bias of the f0 predictor, and standard deviation of its weights. Small, as a pitch error grows with time.
PITCH, PITCH_SPREAD = 150.0, 2.0
LOG_MAGNITUDE = 0.8  # bias of the log spectrum: loudness


# x-vectors are normalised to unit length before this layer: its weights alone decide how much voices differ.
VOICE: dict[str, Draw] = {"spk_embed_affine_layer.weight": lambda noise: noise}


def write_flow(path: Path, stack: Stack, seed: int, sizes: Any) -> None:
    """Write the flow of a stack. The modulation of a DiT must not be zero, as it is at the start of training."""
    state = _drawn(FLOWS[stack], sizes, seed, VOICE)
    torch.save(with_rotary(state, sizes) if stack == stacks.COSYVOICE3 else state, path)


def write_hift(path: Path, stack: Stack, seed: int, sizes: HiFTConfig) -> None:
    """Write the vocoder of a stack, in the official form with weight norm."""
    special: dict[str, Draw] = {
        "f0_predictor.classifier.weight": lambda noise: PITCH_SPREAD * noise,
        "f0_predictor.classifier.bias": lambda noise: torch.full_like(noise, PITCH),
        "m_source.l_linear.weight": lambda noise: 2 * noise,
        "conv_post.weight": lambda noise: 0.12 * _scaled(noise),
        "conv_post.bias": lambda noise: torch.where(torch.arange(len(noise)) < len(noise) // 2, LOG_MAGNITUDE, 0.0),
        ".alpha": lambda noise: (1 + 0.2 * noise).abs() + 0.1,
        # Many residual branches in a row: each has to be small, or their sum diverges.
        **{f".convs2.{index}.weight": lambda noise: 0.3 * _scaled(noise) for index in range(3)},
    }
    network = CausalHiFTGenerator if stack == stacks.COSYVOICE3 else HiFTGenerator
    torch.save(split_weight_norm(_drawn(network, sizes, seed, special)), path)


def _drawn(kind: Callable[[Any], nn.Module], sizes: Any, seed: int, special: dict[str, Draw]) -> dict[str, Tensor]:
    """Return a random state_dict with the keys and shapes of a kind of network. special: rules by the end of a key."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        network = kind(sizes)
    state = {}
    for key, value in network.state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        draw = next((draw for end, draw in special.items() if key.endswith(end)), None)
        if draw is not None:
            state[key] = draw(noise)
        elif noise.ndim > 1:
            state[key] = _scaled(noise)
        else:
            state[key] = 1 + 0.1 * noise if key.endswith("weight") else 0.1 * noise
    return state


def _scaled(noise: Tensor) -> Tensor:
    """Return a matrix or kernel (out, in, ...) that keeps the standard deviation of its input."""
    return noise / math.sqrt(noise[0].numel())
