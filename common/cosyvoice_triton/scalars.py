"""Single values among the tensors of a request."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def scalar(sent: Mapping[str, np.ndarray], name: str, default: object = None) -> Any:
    """Return the single element of the tensor `name` as a Python value, a string decoded from UTF-8; `default` if it is
    not among those `sent`. ValueError naming it if it holds several, or is not UTF-8."""
    array = sent.get(name)
    if array is None:
        return default
    if array.size != 1:
        raise ValueError(f"{name} must hold one value, not {array.size} (shape {list(array.shape)})")
    value = array.reshape(-1)[0]
    try:
        return value.item() if array.dtype != object else value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}") from None
