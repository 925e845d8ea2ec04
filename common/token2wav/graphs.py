"""Functions of tensors as CUDA graphs: captured once per size at start-up, replayed as one launch.

A chunk is thousands of kernels, most of them short; launched one by one they would wait for the host.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CHUNK_FRAMES = (32, 64, 104, 128, 208)  # classes of chunk lengths, mel frames
WARM_UPS = 2

Size = tuple[int, ...]


def sizes_up_to(most: int, lengths: Iterable[int]) -> list[Size]:
    """Batch sizes and lengths of which a batch together is not over `most`, which bounds its memory."""
    return [(B, T) for B, T in itertools.product(BATCHES, lengths) if B * T <= most]


@dataclass(frozen=True)
class _Graph:
    inputs: tuple[Tensor, ...]
    graph: torch.cuda.CUDAGraph
    output: Any  # a tensor, or a tuple of them


class Graphs:
    """A bounded pool of graphs of one function. One replay at a time: all of them work in the same memory."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Callable[..., tuple[Tensor, ...]],
        sizes: Iterable[Size],
        name: str,
    ):
        """`inputs` makes a function's inputs of a size, with which it can be called."""
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs: dict[Size, _Graph] = {}
        # Largest first: the smaller ones then fit into the memory that its graph has taken.
        for size in tqdm(sorted(sizes, key=math.prod, reverse=True), desc=f"capturing {name}", unit="graph"):
            self._graphs[size] = self._capture(function, inputs(*size))

    @property
    def sizes(self) -> Iterable[Size]:
        return self._graphs.keys()

    def inputs(self, size: Size) -> tuple[Tensor, ...]:
        """The tensors that the next `run` of that size fills, in part or whole."""
        return self._graphs[size].inputs

    def fitting(self, *needed: int) -> Size | None:
        """The smallest size that holds `needed` in every dimension; None if there is none."""
        holding = [size for size in self._graphs if all(have >= need for have, need in zip(size, needed, strict=True))]
        return min(holding, key=math.prod, default=None)

    def run(self, size: Size, *values: Tensor) -> Any:
        """The function of `values`, which fill the leading corners of that size's inputs; the rest keeps old ones.

        The result has the size's own shape and lasts until the next call.
        """
        captured = self._graphs[size]
        for tensor, value in zip(captured.inputs, values, strict=False):
            tensor[tuple(slice(length) for length in value.shape)].copy_(value, non_blocking=True)
        captured.graph.replay()
        return captured.output

    def _capture(self, function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> _Graph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                function(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            output = function(*inputs)
        return _Graph(inputs, graph, output)
