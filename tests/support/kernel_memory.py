"""Check in Triton's interpreter that kernels use the memory of their tensors only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor


class Extents:
    """The memory that a kernel may use: that of its tensors, and if it has a table of addresses, `addressed`."""

    def __init__(self) -> None:
        self.addressed: list[Tensor] = []
        self._spans: list[tuple[int, int]] = []

    def allow(self, tensors: list[Tensor]) -> None:
        self._spans = [(x.data_ptr(), x.data_ptr() + _nbytes(x)) for x in tensors if x.numel()]

    def check(self, addresses: np.ndarray, size: int) -> None:
        inside = np.zeros(addresses.shape, bool)
        for begin, end in self._spans:
            inside |= (addresses >= begin) & (addresses + np.uint64(size) <= end)
        if not inside.all():
            raise AssertionError(f"{(~inside).sum()} of {inside.size} addresses are outside of the kernel's tensors")


def _nbytes(x: Tensor) -> int:
    """From its first element to its last."""
    return (sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size()


EXTENTS = Extents()


@contextmanager
def checked() -> Iterator[None]:
    """Each address that a kernel reads or writes is within its tensors, or AssertionError."""
    interpreted: set[str] = set()

    def call(self: Any, *given: Any, **named: Any) -> Any:
        """Of a function that a kernel calls. Triton's own makes its module interpreted each time, which takes long."""
        if self.fn.__module__ not in interpreted:
            interpreted.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*given, **named)

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    arguments = interpreter.GridExecutor._init_args_hst

    def init(self: Any, given: Any, named: Any) -> Any:
        passed = [x.base if isinstance(x, TensorDescriptor) else x for x in (*given, *named.values())]
        found = [x for x in passed if isinstance(x, Tensor)]
        EXTENTS.allow(found + (EXTENTS.addressed if "table_ptr" in self.arg_names else []))
        return arguments(self, given, named)

    def masked_load(self: Any, addresses: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        check(addresses, mask)
        return load(self, addresses, mask, *rest, **options)

    def masked_store(self: Any, addresses: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(addresses, mask)
        return store(self, addresses, value, mask, *rest)

    def check(addresses: Any, mask: Any) -> None:
        inside = mask if isinstance(mask, np.ndarray) else mask.data  # of a descriptor's tile it is a plain array
        EXTENTS.check(addresses.data[inside.astype(bool)], addresses.get_element_ty().primitive_bitwidth // 8)

    with (
        patch.object(interpreter.InterpretedFunction, "__call__", call),
        patch.object(interpreter.GridExecutor, "_init_args_hst", init),
        patch.object(builder, "create_masked_load", masked_load),
        patch.object(builder, "create_masked_store", masked_store),
    ):
        yield
