"""Load `flow.pt` of each network: sizes are read from its tensors, and keys and shapes must match exactly."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from cosyvoice_triton.checkpoint import load_strict, read_state, shapes_of
from cosyvoice_triton.networks.flow.config import CosyVoice3FlowConfig, DiTFlowConfig, UNetFlowConfig, stated_solve
from cosyvoice_triton.networks.flow.cosyvoice3 import CosyVoice3Flow, rotary_frequencies
from cosyvoice_triton.networks.flow.dit import DiTFlow
from cosyvoice_triton.networks.flow.unet import UNetFlow

ROTARY_KEY = "decoder.estimator.rotary_embed.inv_freq"
FlowT = TypeVar("FlowT", UNetFlow, DiTFlow, CosyVoice3Flow)


def _load(
    kind: type[FlowT],
    config: type[Any],
    path: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> FlowT:
    """Load a `flow.pt`. ValueError names the file, or every key and shape that does not fit."""
    state = read_state(path)
    with torch.device("meta"):
        flow = kind(config.from_shapes(shapes_of(state), **stated_solve(Path(path))))
    return load_strict(flow, without_rotary(state) if kind is CosyVoice3Flow else state, device, dtype)


# Each takes the path, a device and a dtype: of CosyVoice2, Step-Audio2 and CosyVoice3.
load_unet_flow = partial(_load, UNetFlow, UNetFlowConfig)
load_dit_flow = partial(_load, DiTFlow, DiTFlowConfig)
load_cosyvoice3_flow = partial(_load, CosyVoice3Flow, CosyVoice3FlowConfig)


def without_rotary(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state_dict without the rotary frequencies, which the network computes, so that they are float32 in
    every precision. ValueError if the file's differ from those."""
    given = state[ROTARY_KEY].float()
    if not torch.allclose(given, rotary_frequencies(2 * len(given)), rtol=1e-4):
        raise ValueError(f"checkpoint: {ROTARY_KEY} is not 10000^(-2i / {2 * len(given)})")
    return {key: tensor for key, tensor in state.items() if key != ROTARY_KEY}


def with_rotary(state: Mapping[str, Tensor], config: CosyVoice3FlowConfig) -> dict[str, Tensor]:
    """Return the state_dict with the rotary frequencies, as the official file has it."""
    return {**state, ROTARY_KEY: rotary_frequencies(config.estimator.head_dim)}
