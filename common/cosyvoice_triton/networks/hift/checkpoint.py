"""`hift.pt`: convolutions have weight norm in the official file and plain kernels in the networks."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from cosyvoice_triton.checkpoint import load_strict, read_state, shapes_of
from cosyvoice_triton.networks.hift.causal import CausalHiFTGenerator
from cosyvoice_triton.networks.hift.config import HiFTConfig
from cosyvoice_triton.networks.hift.generator import HiFTGenerator

_MAGNITUDE = ".parametrizations.weight.original0"
_DIRECTION = ".parametrizations.weight.original1"


def _norm(kernel: Tensor) -> Tensor:
    """Compute the norm over all but the first dimension: (C, *, *) -> (C, 1, 1)."""
    return torch.linalg.vector_norm(kernel, dim=(1, 2), keepdim=True)


def fuse_weight_norm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert an official state_dict to one of the network: each pair of magnitude and direction becomes one kernel.

    Other tensors stay as they are. ValueError if one half of a pair is missing.
    """
    fused: dict[str, Tensor] = {}
    for key, value in state.items():
        if key.endswith(_MAGNITUDE):
            partner = key.removesuffix(_MAGNITUDE) + _DIRECTION
            if partner not in state:
                raise ValueError(f"{key} has no {partner}")
        elif key.endswith(_DIRECTION):
            name = key.removesuffix(_DIRECTION)
            if name + _MAGNITUDE not in state:
                raise ValueError(f"{key} has no {name + _MAGNITUDE}")
            fused[f"{name}.weight"] = value * (state[name + _MAGNITUDE] / _norm(value))
        else:
            fused[key] = value
    return fused


def split_weight_norm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state_dict in the official form: all convolutions have weight norm except those of `source_downs`."""
    split: dict[str, Tensor] = {}
    for key, value in state.items():
        if value.ndim == 3 and not key.startswith("source_downs."):
            name = key.removesuffix(".weight")
            split[name + _MAGNITUDE] = _norm(value)
            split[name + _DIRECTION] = value
        else:
            split[key] = value
    return split


def load_hift(path: str | Path, device: str | torch.device = "cpu") -> HiFTGenerator:
    """Return the network of a `hift.pt`, with sizes read from its tensors, in eval mode and without gradients.

    ValueError if the file is missing or no HiFT checkpoint, or naming every key and shape that does not fit.
    """
    fused = _fused(path)
    hift = HiFTGenerator(HiFTConfig.from_shapes(shapes_of(fused)))
    return load_strict(hift, fused, device, torch.float32).to(device)  # again, for the STFT window, which is no weight


def load_causal_hift(path: str | Path, device: str | torch.device = "cpu") -> CausalHiFTGenerator:
    """Load CosyVoice3's `hift.pt`."""
    fused = _fused(path)
    return build_causal_hift(HiFTConfig.from_shapes(shapes_of(fused)), fused, device)


def build_causal_hift(
    config: HiFTConfig, fused: Mapping[str, Tensor], device: str | torch.device = "cpu"
) -> CausalHiFTGenerator:
    """Return the network with the weights of `fuse_weight_norm`. Raises ValueError with every key and shape that does
    not fit."""
    hift = load_strict(CausalHiFTGenerator(config), fused, device, torch.float32).to(device)
    hift.f0_predictor.double()
    return hift


def _fused(path: str | Path) -> dict[str, Tensor]:
    return fuse_weight_norm({key.removeprefix("generator."): value for key, value in read_state(path).items()})
