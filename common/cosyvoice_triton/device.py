"""Tensors between the host and a GPU, and streams of a priority."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

URGENT = -5  # the priority of a stream; torch takes the nearest one that the GPU has


def use(device: torch.device | str) -> None:
    """Make the GPU that `device` names the current one of this thread: kernels and graphs take no device argument."""
    if torch.device(device).index is not None:
        torch.cuda.set_device(device)


def on_device(values: Sequence[object] | np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return `values` on the device, without waiting for it: a plain copy would wait for everything launched before."""
    return pinned(torch.as_tensor(values), device).to(device, non_blocking=True)


def pinned(host: Tensor, device: torch.device) -> Tensor:
    """Return `host` in memory from which a GPU copies without holding back the thread; on a CPU `host` itself."""
    return host.pin_memory() if device.type == "cuda" else host


def copied(*values: Tensor) -> Callable[[], list[Tensor]]:
    """Begin to copy `values`, of one device, to the CPU; return what waits for the copies and returns them. Only what
    this stream has been given by now is waited for: a copy to memory that is not pinned would hold back the work that
    other threads launch meanwhile."""
    device = values[0].device
    if device.type != "cuda":
        made = [each.to("cpu", copy=True) for each in values]
        return lambda: made
    copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in values]
    for copy, each in zip(copies, values, strict=True):
        copy.copy_(each, non_blocking=True)
    wait = launched(torch.cuda.current_stream(device))
    return lambda: (wait(), copies)[1]


def on_host(*values: Tensor) -> list[Tensor]:
    """Return `values`, of one device, on the CPU, after one wait."""
    return copied(*values)()


def launched(stream: torch.cuda.Stream | None) -> Callable[[], object]:
    """Return what waits for all that the stream has been given by now; without a stream that is done."""
    if stream is None:
        return lambda: None
    event = torch.cuda.Event()
    event.record(stream)
    return event.synchronize


def new_stream(device: torch.device | int, urgent: bool) -> torch.cuda.Stream:
    """Return a stream. urgent: the GPU starts its kernels, and those of CUDA graphs captured on it, before others."""
    return torch.cuda.Stream(device, priority=URGENT if urgent else 0)
