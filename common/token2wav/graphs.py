"""Functions of tensors as CUDA graphs: captured once per size at start-up, replayed as one launch.

A chunk takes thousands of kernels, most of them short; launched one by one, they would wait for the host.
"""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from common.token2wav.limits import Size

logger = logging.getLogger(__name__)

WARM_UPS = 2


@dataclass(frozen=True)
class _Graph:
    inputs: tuple[Tensor, ...]
    graph: torch.cuda.CUDAGraph
    output: Any  # a tensor, or a tuple of them


class Graphs:
    """The graphs of one function, one per size. One replay at a time: they share their memory."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Callable[..., tuple[Tensor, ...]],
        sizes: Iterable[Size],
        name: str,
    ):
        """`inputs(*size)` makes tensors of a size that `function` can be called with; `name` is for the log."""
        self._name = name
        self._warned = False
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs: dict[Size, _Graph] = {}
        # Largest first: the smaller ones then fit into the memory that its graph took.
        for size in tqdm(sorted(sizes, key=math.prod, reverse=True), desc=f"capturing {name}", unit="graph"):
            self._graphs[size] = self._capture(function, inputs(*size))

    @property
    def sizes(self) -> Iterable[Size]:
        return self._graphs.keys()

    def inputs(self, size: Size) -> tuple[Tensor, ...]:
        """The input tensors of that size; the next `run` fills them partly or wholly."""
        return self._graphs[size].inputs

    def fitting(self, *needed: int, warn: bool = True) -> Size | None:
        """The smallest size that holds `needed` in every dimension; None if there is none.

        warn: log, once, that the length alone is beyond every graph, so that not even splitting the batch would help.
        """
        holding = [size for size in self._graphs if all(have >= need for have, need in zip(size, needed, strict=True))]
        longest = max((size[-1] for size in self._graphs), default=0)
        if warn and needed[-1] > longest and not self._warned:
            self._warned = True
            logger.warning(
                "%s: a length of %d is beyond the largest CUDA graph, %d, and is computed by eager kernels, which is "
                "slow; set max_hop_tokens and first_hop_tokens to the hops that clients use, or raise batch_memory_mb",
                self._name,
                needed[-1],
                longest,
            )
        return min(holding, key=math.prod, default=None)

    def run(self, size: Size, *values: Tensor) -> Any:
        """The function's result for `values`, copied to the leading corner of each input; the rest keeps older values.

        The result has the shape of the graph's size and is valid until the next call.
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
