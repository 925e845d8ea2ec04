"""Solves as CUDA graphs: one graph per bucket of batch size and chunk length, captured at start-up.

A solve is some 2,500 kernels, most of them short; launched one by one they would wait for the host. A batch is padded
to the next bucket; the fused attention reads each row's memory where it lies.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from common.token2wav.dit_attention import attend
from common.token2wav.dit_memory import Row, TailPool
from common.token2wav.dit_solver import DiTSolver, Scratch

BATCHES = (1, 2, 4, 8, 16, 32, 64)
FRAMES = (32, 64, 104, 128, 208)
MAX_FRAMES = 64 * 104  # of a batch together: bounds the scratch memory, 0.65 MB a frame in fp16
WARM_UPS = 2


class PagedContext:
    """What rows attend to, as a table of addresses and lengths for the fused kernel."""

    def __init__(self, pool: TailPool, batch: int):
        self._pool = pool
        self._depth = pool.keys.shape[2]
        self._table = torch.zeros(6, batch, dtype=torch.int64, device=pool.keys.device)

    def fill(self, rows: list[Row]) -> None:
        """Point at the memory of `rows`; rows of padding see one frame of their own and nothing else."""
        table = torch.zeros(self._table.shape, dtype=torch.int64)
        table[5] = 1
        for index, row in enumerate(rows):
            prompt = row.voice.estimator.attention
            addresses = prompt.keys.data_ptr(), prompt.values.data_ptr()
            lengths = row.voice.prompt_frames, row.tail.slot, row.tail.frames, row.frames
            table[:, index] = torch.tensor([*addresses, *lengths])
        self._table.copy_(table.pin_memory(), non_blocking=True)

    @property
    def frames(self) -> Tensor:
        """(B,) frames of each row's own."""
        return self._table[5]

    def attend(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, self._table, self._pool.keys, self._pool.values, step * self._depth + layer)


@dataclass
class _Bucket:
    noise: Tensor  # (B, T, mel)
    conditions: Tensor  # (2, B, T, C)
    context: PagedContext
    scratch: Scratch
    graph: torch.cuda.CUDAGraph
    mel: Tensor  # (B, T, mel)


class GraphedSolve:
    """Solves batches of chunks on a GPU. One solve at a time: its scratch is that of the next."""

    def __init__(self, solver: DiTSolver, pool: TailPool):
        self._solver = solver
        self._pool = pool
        sizes = [(B, T) for B, T in itertools.product(BATCHES, FRAMES) if B * T <= MAX_FRAMES]
        per_frame = solver.steps * solver.depth * 2 * solver.heads * solver.head_dim
        self._keys, self._values = torch.empty(
            2, per_frame * max(B * T for B, T in sizes), device=solver.device, dtype=solver.dtype
        )
        self._memory = torch.cuda.graph_pool_handle()
        self._buckets = {}
        # Largest first: the smaller ones then fit into the memory that its graph has taken.
        for size in tqdm(sorted(sizes, key=lambda s: -s[0] * s[1]), desc="capturing CUDA graphs", unit="graph"):
            self._buckets[size] = self._capture(*size)

    def run(self, rows: list[Row], noise: Tensor, conditions: Tensor) -> tuple[Tensor, Scratch]:
        """noise (B, T, mel), conditions (R, T, C) -> mel (B, T, mel), and the scratch to commit from."""
        B, T, _ = noise.shape
        fitting = [size for size in self._buckets if size[0] >= B and size[1] >= T]
        if not fitting:
            return self._run_unpadded(rows, noise, conditions)
        bucket = self._buckets[min(fitting, key=lambda size: size[0] * size[1])]
        bucket.noise[:B, :T] = noise
        bucket.conditions[:, :B, :T] = conditions.unflatten(0, (2, B))
        bucket.context.fill(rows)
        self._load_history(bucket.scratch, rows)
        bucket.graph.replay()
        return bucket.mel[:B, :T], bucket.scratch

    def _run_unpadded(self, rows: list[Row], noise: Tensor, conditions: Tensor) -> tuple[Tensor, Scratch]:
        context = PagedContext(self._pool, len(rows))
        context.fill(rows)
        scratch = self._pool.scratch([row.tail for row in rows], noise.shape[1])
        return self._solver.solve(noise, conditions, context.frames, context, scratch), scratch

    def _load_history(self, scratch: Scratch, rows: list[Row]) -> None:
        history = self._pool.history_of([row.tail for row in rows])
        B = scratch.history.shape[3] // 2
        scratch.history.unflatten(3, (2, B))[:, :, :, :, : len(rows)] = history.unflatten(3, (2, len(rows)))

    def _capture(self, B: int, T: int) -> _Bucket:
        solver = self._solver
        shape = (solver.steps, solver.depth, 2 * B, solver.heads, T, solver.head_dim)
        count = torch.Size(shape).numel()
        history = self._pool.history.new_zeros(solver.steps, solver.depth, 2, 2 * B, *self._pool.history.shape[-2:])
        scratch = Scratch(self._keys[:count].view(shape), self._values[:count].view(shape), history)
        noise = torch.zeros(B, T, solver.mel_bins, device=solver.device)
        conditions = torch.zeros(2, B, T, solver.width, device=solver.device, dtype=solver.dtype)
        context = PagedContext(self._pool, B)
        context.fill([])

        def solve() -> Tensor:
            return solver.solve(noise, conditions.flatten(0, 1), context.frames, context, scratch)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                solve()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            mel = solve()
        return _Bucket(noise, conditions, context, scratch, graph, mel)
