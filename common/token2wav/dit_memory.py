"""Where the DiT's keys and values live: a voice's prompt once, shared by its streams, and a bounded tail per stream.

Attention knows no positions, so a tail is a ring: new frames overwrite the oldest ones where they lie.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from common.constants import DIT_TAIL_FRAMES
from common.errors import UnavailableError
from common.flow.cache import DiTFlowCache
from common.token2wav.dit_solver import HISTORY, DiTSolver, Scratch


@dataclass
class Tail:
    """The recent frames of one stream: a slot of the pool, and how much of its ring is written."""

    slot: int
    frames: int = 0  # written, at most the ring's length
    next: int = 0  # where the next frame goes


class TailPool:
    """One ring and one convolution history per live stream, allocated once."""

    def __init__(self, solver: DiTSolver, slots: int, frames: int = DIT_TAIL_FRAMES):
        s = solver
        shape = (slots, s.steps, s.depth, 2, s.heads, frames, s.head_dim)
        self.keys = torch.empty(shape, device=s.device, dtype=s.dtype)
        self.values = torch.empty_like(self.keys)
        history = (slots, s.steps, s.depth, 2, 2, HISTORY, s.width)  # (.., convolution, guidance row, frame, C)
        self.history = torch.zeros(history, device=s.device, dtype=s.dtype)
        self.frames = frames
        self._free = list(range(slots))

    @property
    def nbytes_per_stream(self) -> int:
        return (self.keys.nbytes + self.values.nbytes + self.history.nbytes) // len(self.keys)

    def acquire(self, voice: DiTFlowCache) -> Tail:
        """A slot for a stream that begins after its prompt. UnavailableError when all are taken."""
        if not self._free:
            raise UnavailableError(f"all {len(self.keys)} streams of the vocoder are taken")
        self.history[self._free[-1]] = voice.estimator.conv.transpose(-1, -2)  # (.., C, frame) -> (.., frame, C)
        return Tail(self._free.pop())

    def release(self, tail: Tail) -> None:
        self._free.append(tail.slot)

    def scratch(self, tails: list[Tail], frames: int) -> Scratch:
        """Room for a solve over `frames` frames of the streams, with their convolution histories."""
        _, steps, depth, _, H, _, D = self.keys.shape
        keys = self.keys.new_empty(steps, depth, 2 * len(tails), H, frames, D)
        return Scratch(keys, torch.empty_like(keys), self.history_of(tails))

    def history_of(self, tails: list[Tail]) -> Tensor:
        """Convolution histories of B streams, (steps, depth, convolution, R, frame, C)."""
        history = self.history[[tail.slot for tail in tails]]  # (B, steps, depth, convolution, guidance row, frame, C)
        return history.permute(1, 2, 3, 4, 0, 5, 6).flatten(3, 4)

    def commit(self, tail: Tail, scratch: Scratch, row: int, frames: int) -> None:
        """Append the `frames` that a solve computed for its stream number `row` of B."""
        B = scratch.keys.shape[2] // 2  # the stream's two guidance rows are B apart
        count = min(frames, self.frames)
        first = min(count, self.frames - tail.next)  # up to the ring's end; the rest goes to its start
        for ring, new in ((self.keys, scratch.keys), (self.values, scratch.values)):
            slot, new = ring[tail.slot], new[:, :, row::B, :, frames - count : frames]
            slot[..., tail.next : tail.next + first, :] = new[..., :first, :]
            slot[..., : count - first, :] = new[..., first:, :]
        self.history[tail.slot] = scratch.history[:, :, :, row::B]
        tail.next = (tail.next + count) % self.frames
        tail.frames = min(tail.frames + count, self.frames)


@dataclass(frozen=True)
class Row:
    """One stream of a batch: what it attends to, and how many of the chunk's frames are its own."""

    voice: DiTFlowCache
    tail: Tail
    frames: int


class Solve(Protocol):
    """A way to run the solver over rows whose memory lies apart."""

    def run(self, rows: list[Row], noise: Tensor, conditions: Tensor) -> tuple[Tensor, Scratch]:
        """noise (B, T, mel), conditions (R, T, C) -> mel (B, T, mel), and the scratch to commit from."""
        ...


class GatheredSolve:
    """Solves batches of chunks on any device, over context that is copied together for each."""

    def __init__(self, solver: DiTSolver, pool: TailPool):
        self._solver = solver
        self._pool = pool

    def run(self, rows: list[Row], noise: Tensor, conditions: Tensor) -> tuple[Tensor, Scratch]:
        T = noise.shape[1]
        frames = torch.tensor([row.frames for row in rows], device=noise.device)
        scratch = self._pool.scratch([row.tail for row in rows], T)
        context = GatheredContext(self._pool, rows, T)
        return self._solver.solve(noise, conditions, frames, context, scratch), scratch


class GatheredContext:
    """Context copied into one padded tensor per solve: for CPUs, and what the fused kernel is checked against."""

    def __init__(self, pool: TailPool, rows: list[Row], frames: int):
        lengths = [row.voice.prompt_frames + row.tail.frames for row in rows]
        steps, depth, _, H, _, D = rows[0].voice.estimator.attention.keys.shape
        shape = (steps, depth, 2 * len(rows), H, max(lengths), D)
        self._keys = pool.keys.new_zeros(shape)
        self._values = pool.keys.new_zeros(shape)
        visible = torch.zeros(2 * len(rows), max(lengths) + frames, dtype=torch.bool, device=pool.keys.device)
        for index, row in enumerate(rows):
            both = [index, len(rows) + index]
            P, length = row.voice.prompt_frames, lengths[index]
            prompt = row.voice.estimator.attention
            for out, of_prompt, of_tail in (
                (self._keys, prompt.keys, pool.keys),
                (self._values, prompt.values, pool.values),
            ):
                out[:, :, both, :, :P] = of_prompt
                out[:, :, both, :, P:length] = of_tail[row.tail.slot, ..., : row.tail.frames, :]
            visible[both, :length] = True
            visible[both, max(lengths) : max(lengths) + row.frames] = True
        self._mask = None if visible.all() else visible[:, None, None]  # (R, 1, 1, K)

    def attend(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = torch.cat([self._keys[step, layer], k], dim=2)
        values = torch.cat([self._values[step, layer], v], dim=2)
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=self._mask)
        return attended.transpose(1, 2).flatten(2)  # (R, H, T, D) -> (R, T, H * D)
