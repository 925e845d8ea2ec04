"""A function of a batch size as CUDA graphs: captured once per size, replayed as one launch."""

from collections.abc import Callable, Iterable

import torch
from tqdm import tqdm

from cosyvoice_triton.device import new_stream

WARM_UPS = 2


class SizedGraphs:
    """One replay at a time. The function reads and writes tensors that it owns; their contents change with each run."""

    def __init__(self, function: Callable[[int], None], sizes: Iterable[int], name: str) -> None:
        """`name`: for the log."""
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool, device = torch.cuda.graph_pool_handle(), torch.cuda.current_device()
        stream = new_stream(device, urgent=True)  # every listener waits for tokens; token2wav's batches are long
        # Largest first: the smaller ones then fit into the memory that its graph took.
        for size in tqdm(sorted(sizes, reverse=True), desc=f"capturing {name}", unit="graph"):
            for _ in range(WARM_UPS):  # compiles kernels
                function(size)
            torch.cuda.synchronize()
            graph = self._graphs[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                function(size)

    def run(self, size: int) -> None:
        self._graphs[size].replay()
