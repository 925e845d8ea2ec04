"""What models do with requests: read single values among their tensors, and compute batches in which one item's failure
is its own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from cosyvoice_triton.errors import is_fatal

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


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


def isolated(
    compute: Callable[[Sequence[ItemT]], Sequence[ResultT]], items: Sequence[ItemT]
) -> list[ResultT | Exception]:
    """Return the results of `compute(items)` in order; if that raises, those of each half, and so on down to single
    items.

    So a batch that is too large for the memory is computed in parts, and an item that cannot be computed gets its
    exception while the others get their results. `compute` must leave everything as it was when it raises. Raises what
    makes every later computation useless, too (`errors.is_fatal`).
    """
    try:
        return list(compute(items))
    except Exception as error:
        if is_fatal(error):
            raise
        if len(items) == 1:
            return [error]
    # Out of the handler, so that the tensors in the error's frames are freed before the next attempt.
    half = len(items) // 2
    return isolated(compute, items[:half]) + isolated(compute, items[half:])
