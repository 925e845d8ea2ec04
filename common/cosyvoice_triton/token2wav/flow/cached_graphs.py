"""The solve on a GPU: fused kernels that read each stream's own memory, as CUDA graphs by batch and length."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from cosyvoice_triton import kernels
from cosyvoice_triton.device import pinned
from cosyvoice_triton.networks.flow.cache import KeyValues
from cosyvoice_triton.token2wav.flow.cached_solver import CachedSolver
from cosyvoice_triton.token2wav.flow.kv_cache import CachedStream, Prefilled, Row, StreamCachePool
from cosyvoice_triton.token2wav.flow.solve import prefilled
from cosyvoice_triton.token2wav.gpu.graphs import TRIED, Graphs
from cosyvoice_triton.token2wav.gpu.limits import PREFILL_FRAMES, BatchLimits, Size, batch_parts
from cosyvoice_triton.token2wav.gpu.noise import NoiseTape

# Those of `kernels.attend_paged`; where in its place the next frame goes; the first frame's index; `kernels.append`'s
# addresses of that place, for keys and for values, its length, and how many frames it keeps.
TABLE_ROWS = 12


class PagedContext:
    """The context of a batch as a table (TABLE_ROWS, B) of addresses and lengths for the kernels."""

    def __init__(self, pool: StreamCachePool, table: Tensor):
        self._pool = pool
        self._table = table
        self._depth = pool.keys.shape[2]

    def attend(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plane = step * self._depth + layer
        pool = self._pool
        return kernels.attend_paged(q, k, v, self._table, pool.keys, pool.values, plane, pool.mask_chunk)

    def keep(self, step: int, keys: Tensor, values: Tensor) -> None:
        kernels.append(keys, values, self._table, step, int8=self._pool.int8)


class GraphedSolve:
    """The solve on a GPU. One batch at a time: the graphs of all sizes share their memory.

    limits: if `of_prompts`, there are graphs for prompts, too. most: frames of a batch of chunks, padding included.
    make: makes the graphs.
    """

    def __init__(
        self,
        solver: CachedSolver,
        pool: StreamCachePool,
        noise: NoiseTape,
        limits: BatchLimits,
        most: int,
        *,
        make: Callable[..., Graphs] = Graphs,
    ):
        self._solver = solver
        self._pool = pool
        self._noise = noise
        self.sizes = limits.sizes(limits.row_frames, most)
        solve, prefill = (partial(function, tried=TRIED) for function in (self._solve, self._prefill))
        self._graphs = make(self._solve, self._inputs, self.sizes, "the flow", worker=limits.worker, trial=solve)
        self._prompts: Graphs | None = None
        if limits.of_prompts:
            prompts = limits.sizes(limits.prompt_frames, PREFILL_FRAMES)
            self._prompts = make(self._prefill, self._inputs, prompts, "prompts", worker=limits.worker, trial=prefill)

    def prefill(self, mu: Tensor, speaker: Tensor, mel: Tensor, frames: Sequence[int]) -> list[Prefilled]:
        # Without graphs of their own, prompts are computed one by one.
        parts = self._prompts.parts(*mu.shape[:2]) if self._prompts else batch_parts((), *mu.shape[:2])
        left = []
        for of, size in parts:
            prompts = [self._pool.empty_attention(count) for count in frames[of]]
            columns = [self._own_frames_column(count, into) for count, into in zip(frames[of], prompts, strict=True)]
            table = self._padded(columns, size[0] if size else len(prompts))
            if self._prompts is None or size is None:
                history = self._prefill(mu[of], speaker[of], table.to(mu.device), mel[of])
            else:
                history = self._prompts.run(size, mu[of], speaker[of], table, mel[of])
            left += prefilled(prompts, history, self._pool.rows)
        return left

    def run(self, streams: Sequence[CachedStream], rows: Sequence[Row], mu: Tensor, known: Tensor | None) -> Tensor:
        B, T, _ = mu.shape

        def compute(of: slice, size: Size | None) -> Tensor:
            part, computed = streams[of], rows[of]
            inputs = mu[of], torch.cat([stream.prompt.speaker for stream in part])
            others = () if known is None else (known[of],)
            if size is None:
                mel = self._solve(*inputs, self._table(part, computed, len(part)).to(mu.device), *others)
            else:
                mel = self._graphs.run(size, *inputs, self._table(part, computed, size[0]), *others)
            for stream, row in zip(part, computed, strict=True):
                self._pool.advance(stream.cache, row)
            return mel[: len(part), :T]

        return self._graphs.run_rows(B, T, compute)

    def _prefill(self, mu: Tensor, speaker: Tensor, table: Tensor, mel: Tensor, *, tried: int | None = None) -> Tensor:
        """Prefill B prompts: mu and mel (B, T, mel), speaker (B, mel), table (TABLE_ROWS, B) -> their convolution
        history, see `Scratch`; their keys and values go where the table says."""
        solver, (B, T, _) = self._solver, mu.shape
        starts, frames, kept = table[7], table[5], table[11]
        rows = solver.rows(starts, frames, kept, T, PagedContext(self._pool, table), solver.no_history(B))
        solver.solve(self._noise.gather(starts, T), solver.conditions(mu, speaker, mel), rows, tried)
        return rows.scratch.next_history

    def _solve(
        self, mu: Tensor, speaker: Tensor, table: Tensor, known: Tensor | None = None, *, tried: int | None = None
    ) -> Tensor:
        """Solve: mu and known (B, T, mel), speaker (B, mel), table (TABLE_ROWS, B) -> mel (B, T, mel); updates rings
        and, unless only a part is `tried`, histories."""
        T, solver, pool = mu.shape[1], self._solver, self._pool
        slots, starts, frames, kept = table[3], table[7], table[5], table[11]
        rows = solver.rows(starts, frames, kept, T, PagedContext(pool, table), pool.history_of(slots))
        mel = solver.solve(self._noise.gather(starts, T), solver.conditions(mu, speaker, known), rows, tried)
        # After a trial, the next history of the other steps and blocks is memory that nothing was written to.
        pool.keep_history(slots, rows.scratch.next_history if tried is None else rows.scratch.history)
        return mel

    def _table(self, streams: Sequence[CachedStream], rows: Sequence[Row], batch: int) -> Tensor:
        columns = []
        for stream, row in zip(streams, rows, strict=True):
            prompt, stream_cache = stream.prompt.attention, stream.cache
            lengths = prompt.frames, stream_cache.slot, stream_cache.frames, row.frames, stream_cache.next, row.start
            columns.append([*_addresses(prompt), *lengths, *self._ring(stream_cache.slot), row.kept])
        return self._padded(columns, batch)

    def _padded(self, columns: list[list[int]], batch: int) -> Tensor:
        """Return the pinned table (TABLE_ROWS, batch). Padding rows have no frames and write to the scratch slot."""
        columns = columns + [self._own_frames_column(0)] * (batch - len(columns))
        table = torch.tensor(columns).T.contiguous()  # (B, TABLE_ROWS) -> (TABLE_ROWS, B)
        return pinned(table, self._solver.device)

    def _own_frames_column(self, frames: int, into: KeyValues | None = None) -> list[int]:
        """Return the column of a row that attends to its own frames only: a prompt, kept in `into`, or padding."""
        slot = self._pool.slots
        place = (*_addresses(into), into.frames) if into else self._ring(slot)
        return [0, 0, 0, slot, 0, frames, 0, 0, *place, frames]

    def _ring(self, slot: int) -> tuple[int, int, int]:
        return *_addresses(KeyValues(self._pool.keys[slot], self._pool.values[slot])), self._pool.frames

    def _inputs(self, B: int, T: int) -> tuple[Tensor, ...]:
        solver = self._solver
        mu = torch.zeros(B, T, solver.mel_bins, device=solver.device, dtype=solver.dtype)
        return mu, torch.zeros_like(mu[:, 0]), self._table([], [], B).to(solver.device), torch.zeros_like(mu)


def _addresses(attention: KeyValues) -> tuple[int, int]:
    return attention.keys.data_ptr(), attention.values.data_ptr()
