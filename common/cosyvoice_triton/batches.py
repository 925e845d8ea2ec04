"""Batches in which one item's failure is its own."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from cosyvoice_triton.errors import is_fatal

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


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
