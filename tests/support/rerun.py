"""A stand-in for the capture of CUDA graphs: a replay calls the function."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from cosyvoice_triton.token2wav.gpu.graphs import Graphs
from torch import Tensor


class Rerun:
    """Captures functions of fixed tensors. As on a GPU, where graphs share their memory, a replay spoils the results
    of the other sizes."""

    def __init__(self, worker: int) -> None:
        self._made: list[Replay] = []

    def compile(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def warm_up(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        return function(*inputs)

    def capture(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], result: Tensor) -> "Replay":
        self._made.append(Replay(function, inputs, result, self._made))
        return self._made[-1]


class Replay:
    def __init__(
        self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], result: Tensor, others: "list[Replay]"
    ) -> None:
        self._function, self._inputs, self._result, self._others = function, inputs, result, others

    def replay(self) -> None:
        result = self._function(*self._inputs)
        for other in self._others:
            other._result.fill_(torch.nan)
        self._result.copy_(result)


def rerun_graphs(*arguments: Any, **options: Any) -> Graphs:
    return partial(Graphs, capture=Rerun)(*arguments, **options)
