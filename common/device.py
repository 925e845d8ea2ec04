"""Small tensors from the host to a GPU."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def on_device(values: Sequence[object] | np.ndarray | Tensor, device: torch.device) -> Tensor:
    """`values` on the device, without waiting for it: a plain copy would wait for everything launched before."""
    host = torch.as_tensor(values)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
