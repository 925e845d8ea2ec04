"""The DiT's solve on a GPU: fused kernels over memory that lies apart, as CUDA graphs by batch and chunk size."""

import torch
from torch import Tensor

from common import kernels
from common.flow.cache import KeyValues
from common.flow.dit import NORM_EPS
from common.flow.dit_flow import DiTFlow
from common.token2wav.dit.memory import Heard, Row, TailPool
from common.token2wav.dit.solver import Context, DiTSolver, Scratch
from common.token2wav.graphs import CHUNK_FRAMES, Graphs, sizes_up_to
from common.token2wav.noise import NoiseTape

MAX_FRAMES = 64 * 104  # of a batch together: 0.65 MB of scratch a frame in fp16
PROMPT_FRAMES = (128, 256, 384, 512, 768, 1024, 1504)  # classes of prompts' lengths: up to 30 s
TABLE_ROWS = 8  # those of `kernels.attend_paged`, the ring's next place, the first frame's index


class FusedDiTSolver(DiTSolver):
    """Seven kernels per block."""

    def _block(self, h: Tensor, step: int, layer: int, frames: Tensor, context: Context, scratch: Scratch) -> Tensor:
        """(R, T, C) -> the same tensor"""
        R, T, _ = h.shape
        w, m = self._blocks[layer], self._modulation[step][layer]
        keys, values = scratch.keys[step, layer], scratch.values[step, layer]
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
    """What rows attend to, as a table (TABLE_ROWS, B) of addresses and lengths for the kernels."""

    def __init__(self, pool: TailPool, table: Tensor):
        self._pool = pool
        self._table = table
        self._depth = pool.keys.shape[2]

    def attend(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plane = step * self._depth + layer
        return kernels.attend_paged(q, k, v, self._table, self._pool.keys, self._pool.values, plane)


class GraphedSolve:
    """Solves batches of chunks on a GPU. One at a time: all sizes work in the same memory."""

    def __init__(self, network: DiTFlow, pool: TailPool, noise: NoiseTape, steps: int):
        self._solver = FusedDiTSolver(network, steps)
        self._pool = pool
        self._noise = noise
        self._graphs = Graphs(self._solve, self._inputs, sizes_up_to(MAX_FRAMES, CHUNK_FRAMES), "the flow")
        self._prompts = Graphs(self._listen, self._prompt_inputs, [(T,) for T in PROMPT_FRAMES], "prompts")

    def listen(self, mu: Tensor, speaker: Tensor, mel: Tensor) -> Heard:
        T = mu.shape[1]
        table = torch.tensor(self._nobody(frames=T))[:, None].pin_memory()  # (8,) -> (8, 1)
        size = self._prompts.fitting(T)
        if size is None:
            heard = self._listen(mu, mel, speaker, table.to(mu.device))
        else:
            heard = self._prompts.run(size, mu, mel, speaker, table)
        keys, values, history = (x.clone() for x in (heard[0][..., :T, :], heard[1][..., :T, :], heard[2]))
        return Heard(KeyValues(keys.contiguous(), values.contiguous()), history)

    def run(self, rows: list[Row], mu: Tensor) -> Tensor:
        B, T, _ = mu.shape
        size = self._graphs.fitting(B, T)
        speaker = torch.cat([row.voice.speaker for row in rows])
        if size is None:
            mel = self._solve(mu, speaker, self._table(rows, B).to(mu.device))
        else:
            mel = self._graphs.run(size, mu, speaker, self._table(rows, size[0]))
        for row in rows:
            self._pool.advance(row)
        return mel[:B, :T]

    def _listen(self, mu: Tensor, mel: Tensor, speaker: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """mu and mel (1, T, mel), speaker (1, mel), table (TABLE_ROWS, 1) -> keys, values, history as `Heard` has."""
        solver, T = self._solver, mu.shape[1]
        scratch = solver.scratch(solver.no_history(2), T)
        conditions = solver.conditions(mu, speaker, mel)
        solver.solve(self._noise.gather(table[7], T), conditions, table[5], PagedContext(self._pool, table), scratch)
        return scratch.keys, scratch.values, scratch.next_history

    def _solve(self, mu: Tensor, speaker: Tensor, table: Tensor) -> Tensor:
        """mu (B, T, mel), speaker (B, mel), table (TABLE_ROWS, B) -> mel (B, T, mel); rings and histories go on."""
        T, solver, pool = mu.shape[1], self._solver, self._pool
        slots, frames, starts = table[3], table[5], table[7]
        scratch = solver.scratch(pool.history_of(slots), T)
        conditions = solver.conditions(mu, speaker)
        mel = solver.solve(self._noise.gather(starts, T), conditions, frames, PagedContext(pool, table), scratch)
        pool.keep_history(slots, scratch.next_history)
        kernels.append(scratch.keys, pool.keys, table)
        kernels.append(scratch.values, pool.values, table)
        return mel

    def _table(self, rows: list[Row], batch: int) -> Tensor:
        """Pinned; rows of padding see one frame of their own and write to nobody's slot."""
        columns = []
        for row in rows:
            prompt, tail = row.voice.attention, row.tail
            addresses = prompt.keys.data_ptr(), prompt.values.data_ptr()
            columns.append([*addresses, prompt.frames, tail.slot, tail.frames, row.frames, tail.next, row.start])
        columns += [self._nobody(frames=1)] * (batch - len(rows))
        return torch.tensor(columns).T.contiguous().pin_memory()  # (B, 8) -> (8, B)

    def _nobody(self, frames: int) -> list[int]:
        """The column of a row that attends to its own frames alone."""
        return [0, 0, 0, self._pool.slots, 0, frames, 0, 0]

    def _inputs(self, B: int, T: int) -> tuple[Tensor, ...]:
        solver = self._solver
        mu = torch.zeros(B, T, solver.mel_bins, device=solver.device, dtype=solver.dtype)
        return mu, torch.zeros_like(mu[:, 0]), self._table([], B).to(solver.device)

    def _prompt_inputs(self, T: int) -> tuple[Tensor, ...]:
        mu, speaker, table = self._inputs(1, T)
        return mu, torch.zeros_like(mu), speaker, table
