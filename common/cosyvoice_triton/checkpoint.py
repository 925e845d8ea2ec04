"""Strict checkpoint loading: a network gets exactly its tensors, or an error that lists the differences."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor, nn

Shapes = Mapping[str, torch.Size]
Network = TypeVar("Network", bound=nn.Module)


def read_state(path: str | Path, device: str = "cpu") -> dict[str, Tensor]:
    """Return the named tensors of a file, on a device ("meta": shapes only). No code is unpickled.

    Raise ValueError naming the file if it is missing, contains anything else, or values that are not finite.
    """
    try:
        state = load_plain(path, device)
    except FileNotFoundError:
        raise ValueError(f"checkpoint {path} does not exist") from None
    except ValueError as error:
        raise ValueError(f"checkpoint {path} is not a file of tensors: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"checkpoint {path} is not a dictionary of tensors")
    require_finite(state, path)
    return state


def load_plain(file: str | Path | BinaryIO, device: str = "cpu") -> Any:
    """Return the content of a file of `torch.save` with tensors and plain values only. No code is unpickled.

    ValueError saying why it cannot be read; torch's own message tells to load the file in a way that runs its code.
    """
    try:
        return torch.load(file, map_location=device, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # other contents make the parser raise errors of many types
        reason = str(error).partition("\n")[0] or type(error).__name__
        if "Weights only" in reason or isinstance(error, pickle.UnpicklingError):
            reason = "it has Python objects, which are never loaded because they can run code"
        raise ValueError(reason) from error


def require_finite(state: Mapping[str, Tensor], path: str | Path) -> None:
    """Raise ValueError naming the file and a tensor of it that has values which are infinite or no numbers."""
    for name, value in state.items():
        # The sum is not finite if a value is not, and takes a hundredth of the time of `isfinite`.
        if value.is_floating_point() and not value.is_meta and not value.sum(dtype=torch.float32).isfinite():
            raise ValueError(f"checkpoint {path} has values that are not finite in {name!r}")


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {key: tensor.shape for key, tensor in state.items()}


def size_of(shapes: Shapes, key: str, axis: int = 0) -> int:
    """Return the length of one axis of a tensor; ValueError names a tensor that is missing or has fewer axes."""
    shape = shapes.get(key)
    if shape is None or len(shape) <= axis:
        raise ValueError(f"checkpoint: {key!r} gives a size of the network, found {shape and tuple(shape)}")
    return shape[axis]


def shape_differences(expected: Shapes, found: Shapes) -> list[str]:
    """Return one line per key that is missing, unexpected or of another shape; none if both agree."""
    differences = [f"missing: {key}" for key in expected if key not in found]
    differences += [f"unexpected: {key}" for key in found if key not in expected]
    differences += [
        f"mismatched: {key} is {list(found[key])}, not {list(shape)}"
        for key, shape in expected.items()
        if key in found and tuple(found[key]) != tuple(shape)
    ]
    return differences


def load_strict(
    network: Network, state: Mapping[str, Tensor], device: torch.device | str, dtype: torch.dtype
) -> Network:
    """Load a network, which may be on the meta device, and prepare it for inference.

    ValueError listing every difference in keys and shapes.
    """
    differences = shape_differences(shapes_of(network.state_dict()), shapes_of(state))
    if differences:
        raise ValueError(f"checkpoint does not fit {type(network).__name__}:\n  " + "\n  ".join(differences))
    network.load_state_dict({key: tensor.to(device, dtype) for key, tensor in state.items()}, assign=True)
    return network.eval().requires_grad_(False)
