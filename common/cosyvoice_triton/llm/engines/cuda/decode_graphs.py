"""Decoding steps and prefills as CUDA graphs: captured once for each batch size, replayed as one launch."""

from collections.abc import Callable, Iterable

import torch
from tqdm import tqdm

from cosyvoice_triton.device import new_stream


class SizedGraphs:
    """One function of a batch size as CUDA graphs, one for each size.

    The function reads and writes tensors that it owns, whose contents change between replays. One replay runs at a
    time.
    """

    def __init__(self, function: Callable[[int], None], sizes: Iterable[int], name: str) -> None:
        """Capture `function` for these sizes. `name` is shown while they are captured."""
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool, device = torch.cuda.graph_pool_handle(), torch.cuda.current_device()
        stream = new_stream(device, urgent=True)  # every listener waits for tokens; token2wav's batches are long
        # Largest first: the smaller ones then fit into the memory that its graph took.
        for size in tqdm(sorted(sizes, reverse=True), desc=f"capturing {name}", unit="graph"):
            function(size)  # compiles and loads its kernels
            torch.cuda.synchronize()
            graph = self._graphs[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                function(size)

    def run(self, size: int) -> None:
        """Launch the graph of this size. KeyError if it was not captured."""
        self._graphs[size].replay()
