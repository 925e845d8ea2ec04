"""The DiT's solve on a GPU: fused kernels that read each stream's own memory, as CUDA graphs by batch and length."""

from collections.abc import Sequence

import torch
from torch import Tensor

from common import kernels
from common.flow.cache import KeyValues
from common.flow.dit import NORM_EPS
from common.token2wav.dit.memory import DiTChunk, Prefilled, TailPool, first_frame, prefilled
from common.token2wav.dit.solver import Context, DiTSolver, Scratch
from common.token2wav.graphs import Graphs
from common.token2wav.limits import DIT_FRAMES, PREFILL_FRAMES, BatchLimits
from common.token2wav.noise import NoiseTape

# Those of `kernels.attend_paged`; where in its place the next frame goes; the first frame's index; `kernels.append`'s
# addresses of that place, for keys and for values, and its length.
TABLE_ROWS = 11


class FusedDiTSolver(DiTSolver):
    """Seven kernels per block."""

    def _block(self, h: Tensor, step: int, layer: int, frames: Tensor, context: Context, scratch: Scratch) -> Tensor:
        """(R, T, C) -> the same tensor"""
        R, T, _ = h.shape
        w, m = self._blocks[layer], self._modulation[step][layer]
        keys, values = scratch.keys[layer], scratch.values[layer]
        q = torch.empty_like(keys)
        attn, conv, mlp = (m.attn_scale, m.attn_shift), (m.conv_scale, m.conv_shift), (m.mlp_scale, m.mlp_shift)
        kernels.linear(
            h, w.qkv, w.qkv_bias, norm=attn, eps=NORM_EPS, heads=(q, keys, values), qk_norm=w.qk_norm
        )  # fmt: skip
        attended = context.attend(step, layer, q, keys, values)
        kernels.linear(attended, w.proj, w.proj_bias, gate=m.attn_gate, add_to=h)

        history, following = scratch.history[step, layer], scratch.next_history[step, layer]
        first, second = ((history[i], following[i], frames) for i in range(2))
        y = kernels.linear(h, w.conv1, w.conv1_bias, norm=conv, eps=NORM_EPS, history=first)
        norm = (w.norm, w.norm_bias)
        kernels.linear(
            y, w.conv2, w.conv2_bias, norm=norm, mish=True, history=second, gate=m.conv_gate, add_to=h
        )  # fmt: skip

        y = kernels.linear(h, w.fc1, w.fc1_bias, norm=mlp, eps=NORM_EPS, activation="gelu_tanh")
        return kernels.linear(y, w.fc2, w.fc2_bias, gate=m.mlp_gate, add_to=h)

    def _velocity(self, h: Tensor, step: int) -> Tensor:
        norm = self._final[step, 1], self._final[step, 0]
        return kernels.linear(h, self._output, self._output_bias, norm=norm, eps=NORM_EPS)


class PagedContext:
    """The context of a batch as a table (TABLE_ROWS, B) of addresses and lengths for the kernels."""

    def __init__(self, pool: TailPool, table: Tensor):
        self._pool = pool
        self._table = table
        self._depth = pool.keys.shape[2]

    def attend(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plane = step * self._depth + layer
        return kernels.attend_paged(q, k, v, self._table, self._pool.keys, self._pool.values, plane)

    def keep(self, step: int, keys: Tensor, values: Tensor) -> None:
        kernels.append(keys, values, self._table, step)


class GraphedSolve:
    """The solve on a GPU. One batch at a time: the graphs of all sizes share their memory. `limits.of_prompts`: it
    has graphs for prompts too."""

    def __init__(self, solver: FusedDiTSolver, pool: TailPool, noise: NoiseTape, limits: BatchLimits):
        self._solver = solver
        self._pool = pool
        self._noise = noise
        self.sizes = limits.sizes(limits.chunk_frames, DIT_FRAMES)
        self._graphs = Graphs(self._solve, self._inputs, self.sizes, "the flow", lane=limits.lane)
        self._prompts: Graphs | None = None
        if limits.of_prompts:
            prompts = limits.sizes(limits.prompt_frames, PREFILL_FRAMES)
            self._prompts = Graphs(self._prefill, self._prompt_inputs, prompts, "prompts", lane=limits.lane)

    def prefill(self, mu: Tensor, speaker: Tensor, mel: Tensor, frames: Sequence[int]) -> list[Prefilled]:
        B, T, _ = mu.shape
        size = self._prompts.fitting(B, T) if self._prompts else None
        if size is None and B > 1:
            halves = slice(0, B // 2), slice(B // 2, B)
            return [left for part in halves for left in self.prefill(mu[part], speaker[part], mel[part], frames[part])]
        prompts = [self._pool.empty_attention(count) for count in frames]
        columns = [self._own_frames_column(count, into) for count, into in zip(frames, prompts, strict=True)]
        table = self._padded(columns, size[0] if size else B)
        if self._prompts is None or size is None:
            return prefilled(prompts, self._prefill(mu, mel, speaker, table.to(mu.device)))
        return prefilled(prompts, self._prompts.run(size, mu, mel, speaker, table))

    def run(self, chunks: list[DiTChunk], mu: Tensor) -> Tensor:
        B, T, _ = mu.shape
        size = self._graphs.fitting(B, T)
        if size is None and B > 1:
            # The first half is copied: the second one's graph overwrites it.
            first = self.run(chunks[: B // 2], mu[: B // 2]).clone()
            return torch.cat([first, self.run(chunks[B // 2 :], mu[B // 2 :])])
        speaker = torch.cat([chunk.stream.prompt.speaker for chunk in chunks])
        if size is None:
            mel = self._solve(mu, speaker, self._table(chunks, B).to(mu.device))
        else:
            mel = self._graphs.run(size, mu, speaker, self._table(chunks, size[0]))
        for chunk in chunks:
            self._pool.advance(chunk)
        return mel[:B, :T]

    def _prefill(self, mu: Tensor, mel: Tensor, speaker: Tensor, table: Tensor) -> Tensor:
        """mu and mel (B, T, mel), speaker (B, mel), table (TABLE_ROWS, B) -> convolution history of B prompts, see
        `Scratch`; their keys and values go where the table says."""
        solver, (B, T, _) = self._solver, mu.shape
        scratch = solver.scratch(solver.no_history(2 * B), T)
        conditions = solver.conditions(mu, speaker, mel)
        solver.solve(self._noise.gather(table[7], T), conditions, table[5], PagedContext(self._pool, table), scratch)
        return scratch.next_history

    def _solve(self, mu: Tensor, speaker: Tensor, table: Tensor) -> Tensor:
        """mu (B, T, mel), speaker (B, mel), table (TABLE_ROWS, B) -> mel (B, T, mel); updates rings and histories"""
        T, solver, pool = mu.shape[1], self._solver, self._pool
        slots, frames, starts = table[3], table[5], table[7]
        scratch = solver.scratch(pool.history_of(slots), T)
        conditions = solver.conditions(mu, speaker)
        mel = solver.solve(self._noise.gather(starts, T), conditions, frames, PagedContext(pool, table), scratch)
        pool.keep_history(slots, scratch.next_history)
        return mel

    def _table(self, chunks: list[DiTChunk], batch: int) -> Tensor:
        columns = []
        for chunk in chunks:
            prompt, tail = chunk.stream.prompt.attention, chunk.stream.tail
            lengths = prompt.frames, tail.slot, tail.frames, chunk.frames, tail.next, first_frame(chunk)
            columns.append([*_addresses(prompt), *lengths, *self._ring(tail.slot)])
        return self._padded(columns, batch)

    def _padded(self, columns: list[list[int]], batch: int) -> Tensor:
        """(TABLE_ROWS, batch), pinned. Padding rows attend to one frame of their own and write to the scratch slot."""
        columns = columns + [self._own_frames_column(1)] * (batch - len(columns))
        return torch.tensor(columns).T.contiguous().pin_memory()  # (B, TABLE_ROWS) -> (TABLE_ROWS, B)

    def _own_frames_column(self, frames: int, into: KeyValues | None = None) -> list[int]:
        """The column of a row that attends to its own frames only: a prompt, kept in `into`, or padding."""
        slot = self._pool.slots
        place = (*_addresses(into), into.frames) if into else self._ring(slot)
        return [0, 0, 0, slot, 0, frames, 0, 0, *place]

    def _ring(self, slot: int) -> tuple[int, int, int]:
        return *_addresses(KeyValues(self._pool.keys[slot], self._pool.values[slot])), self._pool.frames

    def _inputs(self, B: int, T: int) -> tuple[Tensor, ...]:
        solver = self._solver
        mu = torch.zeros(B, T, solver.mel_bins, device=solver.device, dtype=solver.dtype)
        return mu, torch.zeros_like(mu[:, 0]), self._table([], B).to(solver.device)

    def _prompt_inputs(self, B: int, T: int) -> tuple[Tensor, ...]:
        mu, speaker, table = self._inputs(B, T)
        return mu, torch.zeros_like(mu), speaker, table


def _addresses(attention: KeyValues) -> tuple[int, int]:
    return attention.keys.data_ptr(), attention.values.data_ptr()
