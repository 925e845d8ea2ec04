"""Functions of tensors as CUDA graphs: captured once per size at start-up, replayed as one launch.

A chunk takes thousands of kernels, most of them short; launched one by one, they would wait for the host.
"""

import logging
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from tqdm import tqdm

from cosyvoice_triton.device import new_stream
from cosyvoice_triton.token2wav.gpu.limits import Size, batch_parts
from cosyvoice_triton.token2wav.policy.scheduler import FIRST_CHUNK_WORKER

logger = logging.getLogger(__name__)

# How many Euler steps of a solve are tried before it is captured, and how many blocks of each: all launch the same
# kernels, but the first ones may read what the others do not, such as noise.
TRIED = 2


@cache
def _pool(device: int, worker: int) -> torch.cuda.CUDAGraph:
    """Return the owner of the memory in which the graphs of a worker on that GPU, the current one, compute.

    They share it because one of them is replayed at a time, on one stream, and nothing stays there between two replays:
    inputs and results are outside. The first graph, which does nothing, keeps it: torch frees a pool with its last
    graph, and then nothing can be captured into it.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=_capture_stream(device, worker)):
        torch.zeros(1, device=device)
    return graph


@cache
def _capture_stream(device: int, worker: int) -> torch.cuda.Stream:
    """Return the stream where a worker's graphs are captured: their kernels have its priority and cuBLAS work space."""
    return new_stream(device, worker == FIRST_CHUNK_WORKER)


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """Return the stream where functions run before they are captured, on that GPU, the current one. There is only one:
    on each new stream cuBLAS takes 32 MiB of work space, and what another stream has freed is not used again."""
    return torch.cuda.Stream(device)


class CudaCapture:
    """Makes CUDA graphs of functions of fixed tensors, for one worker of the current GPU. Tests pass one that runs
    functions."""

    def __init__(self, worker: int):
        self._worker = worker

    def compile(self, name: str) -> AbstractContextManager[None]:
        """Compile the kernels of functions that are called in the body, which do not run; `name` is for the log."""
        from cosyvoice_triton.kernels.launch import compiled_ahead  # imports Triton, which CPU builds of torch lack

        return compiled_ahead(name)

    def warm_up(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        """Run the function once, which initialises what it uses; return its result."""
        side = _side_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            result = function(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        return result

    def capture(
        self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], result: Tensor
    ) -> torch.cuda.CUDAGraph:
        """Return the graph that writes the function's result to `result`."""
        graph, device = torch.cuda.CUDAGraph(), torch.cuda.current_device()
        pool, stream = _pool(device, self._worker).pool(), _capture_stream(device, self._worker)
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            result.copy_(function(*inputs))
        return graph


@dataclass(frozen=True)
class _Graph:
    inputs: tuple[Tensor, ...]
    result: Tensor
    graph: torch.cuda.CUDAGraph


class Graphs:
    """The graphs of one function, one per size: a batch size and a length.

    One replay of a worker at a time, those of other functions included.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        inputs: Callable[..., tuple[Tensor, ...]],
        sizes: Iterable[Size],
        name: str,
        worker: int = 0,
        capture: Callable[[int], CudaCapture] = CudaCapture,
        trial: Callable[..., Tensor] | None = None,
    ):
        """`inputs(*size)` makes tensors of a size that `function` can be called with; `name` is for the log.

        trial: launches every kernel of `function` for the same inputs, but less often, and returns a result of the same
        shape. It is what compiles and loads the kernels, because a start-up waits mostly for launches by the host.
        """
        self._name = name
        self._warned = False
        self._graphs: dict[Size, _Graph] = {}
        # Largest first: the smaller ones then fit into the memory that its graph took.
        given = {size: inputs(*size) for size in sorted(sizes, key=math.prod, reverse=True)}
        making, trial = capture(worker), trial or function
        with making.compile(name):
            for size in tqdm(given, desc=f"finding the kernels of {name}", unit="size"):
                trial(*given[size])
        shapes: dict[Size, torch.Size] = {}
        for size in tqdm(given, desc=f"warming up {name}", unit="size"):
            sample = making.warm_up(trial, given[size])
            shapes[size] = sample.shape
        # Where all sizes leave their results.
        memory = sample.new_empty(max(map(math.prod, shapes.values())))
        for size, shape in tqdm(shapes.items(), desc=f"capturing {name}", unit="graph"):
            result = memory[: math.prod(shape)].view(shape)
            self._graphs[size] = _Graph(given[size], result, making.capture(function, given[size], result))

    @property
    def sizes(self) -> Iterable[Size]:
        return self._graphs.keys()

    def inputs(self, size: Size) -> tuple[Tensor, ...]:
        """Return the input tensors of that size; the next `run` fills them partly or wholly."""
        return self._graphs[size].inputs

    def parts(self, rows: int, length: int, *, warn: bool = True) -> list[tuple[slice, Size | None]]:
        """Return how a batch is computed, see `limits.batch_parts`. A row without a size is computed by eager kernels.

        warn: log, once, that the length alone is beyond every graph, so that not even splitting the batch helps.
        """
        longest = max((size[-1] for size in self._graphs), default=0)
        if warn and length > longest and not self._warned:
            self._warned = True
            logger.warning(
                "%s: a length of %d is beyond the largest CUDA graph, %d, and is computed by eager kernels, which is "
                "slow; set max_hop_tokens and first_hop_tokens to the hops that clients use",
                self._name,
                length,
                longest,
            )
        return batch_parts(self._graphs, rows, length)

    def run_rows(
        self, rows: int, length: int, compute: Callable[[slice, Size | None], Tensor], *, warn: bool = True
    ) -> Tensor:
        """Compute a batch of rows of up to that length, as `parts` divides it.

        `compute` returns the results (n, >= length, ..) of some of the rows, by the graph of that size, or by eager
        kernels without one. Returns those of all, (rows, >= length, ..), valid until the next call.
        """
        made = []
        for part, size in self.parts(rows, length, warn=warn):
            result = compute(part, size)
            # The graph of the next part overwrites this result.
            made.append(result if part.stop == rows else result.clone())
        if len(made) == 1:
            return made[0]
        width = min(result.shape[1] for result in made)  # beyond the longest row there is padding only
        return torch.cat([result[:, :width] for result in made])

    def run(self, size: Size, *values: Tensor) -> Tensor:
        """Compute the function of `values`, copied to the leading corner of each input; the rest keeps older values.

        The result has the shape of the graph's size and is valid until the next call.
        """
        captured = self._graphs[size]
        for tensor, value in zip(captured.inputs, values, strict=False):
            tensor[tuple(slice(length) for length in value.shape)].copy_(value, non_blocking=True)
        captured.graph.replay()
        return captured.result
