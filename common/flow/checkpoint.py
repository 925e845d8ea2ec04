"""Loads `flow.pt` of either network: sizes are read from its tensors, and keys and shapes must match exactly."""

from pathlib import Path

import torch

from common.checkpoint import load_strict, read_state, shapes_of
from common.flow.config import DiTFlowConfig, UNetFlowConfig
from common.flow.dit import DiTFlow
from common.flow.unet import UNetFlow


def load_unet_flow(
    path: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> UNetFlow:
    """CosyVoice2's `flow.pt`. ValueError names the file, or every key and shape that does not fit."""
    state = read_state(path)
    with torch.device("meta"):
        flow = UNetFlow(UNetFlowConfig.from_shapes(shapes_of(state)))
    return load_strict(flow, state, device, dtype)


def load_dit_flow(path: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> DiTFlow:
    """Step-Audio2's `token2wav/flow.pt`. ValueError names the file, or every key and shape that does not fit."""
    state = read_state(path)
    with torch.device("meta"):
        flow = DiTFlow(DiTFlowConfig.from_shapes(shapes_of(state)))
    return load_strict(flow, state, device, dtype)
