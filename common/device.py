"""Tensors between the host and a GPU, and streams of a priority."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

URGENT = -5  # the priority of a stream; torch takes the nearest one that the GPU has


def on_device(values: Sequence[object] | np.ndarray | Tensor, device: torch.device) -> Tensor:
    """`values` on the device, without waiting for it: a plain copy would wait for everything launched before."""
    host = torch.as_tensor(values)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def on_host(values: Tensor) -> Tensor:
    """`values` on the CPU. Only this stream is waited for: a copy to memory that is not pinned would hold back the work
    that other threads launch meanwhile."""
    if values.device.type != "cuda":
        return values.to("cpu", copy=True)
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    torch.cuda.current_stream(values.device).synchronize()
    return host


def new_stream(device: torch.device | int, urgent: bool) -> torch.cuda.Stream:
    """urgent: the GPU starts its kernels, and those of CUDA graphs that are captured on it, before the others."""
    return torch.cuda.Stream(device, priority=URGENT if urgent else 0)
