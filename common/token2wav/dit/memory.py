"""Where the DiT's keys and values live: a voice's prompt once, shared by its streams, and a bounded tail per stream.

Attention knows no positions, so a tail is a ring: new frames overwrite the oldest ones where they lie.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.constants import DIT_TAIL_FRAMES
from common.errors import UnavailableError
from common.flow.cache import CONV_HISTORY, EstimatorCache, KeyValues
from common.flow.config import DiTConfig
from common.flow.dit_flow import DiTFlow
from common.token2wav.dit.solver import DiTSolver
from common.token2wav.noise import NoiseTape


@dataclass(frozen=True)
class DiTVoice:
    """What all streams of a voice share and none changes."""

    tokens: np.ndarray  # (P,) of the prompt
    attention: KeyValues  # (steps, depth, 2, H, 2P, D): keys and values of the prompt
    history: Tensor  # (steps, depth, convolution, guidance row, frame, C): the convolutions' at the prompt's end
    speaker: Tensor  # (1, mel): projected x-vector

    @property
    def frames(self) -> int:
        return self.attention.frames

    @property
    def nbytes(self) -> int:
        return self.attention.nbytes + self.history.nbytes


@dataclass
class Tail:
    """The recent frames of one stream: a slot of the pool, and how much of its ring is written."""

    slot: int
    frames: int = 0  # written, at most the ring's length
    next: int = 0  # where the next frame goes


class TailPool:
    """One ring and one convolution history per live stream, allocated once.

    The last slot is nobody's: rows that pad a batch write there.
    """

    def __init__(self, config: DiTConfig, like: Tensor, steps: int, slots: int, frames: int = DIT_TAIL_FRAMES):
        """`like`: a tensor of the device and the dtype."""
        self.keys = like.new_zeros(slots + 1, steps, config.depth, 2, config.heads, frames, config.head_dim)
        self.values = torch.zeros_like(self.keys)
        # (.., convolution, guidance row, frame, C)
        self.history = like.new_zeros(slots + 1, steps, config.depth, 2, 2, CONV_HISTORY, config.width)
        self.frames = frames
        self.slots = slots
        self._free = list(range(slots))

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.history.nbytes

    def voice_bytes(self, frames: int) -> int:
        """What a `DiTVoice` of so many frames takes."""
        keys, history = self.keys[0], self.history[0]
        return 2 * keys.nbytes // self.frames * frames + history.nbytes

    def acquire(self, voice: DiTVoice) -> Tail:
        """A slot for a stream that begins after its prompt. UnavailableError when all are taken."""
        if not self._free:
            raise UnavailableError(f"all {self.slots} streams of the vocoder are taken")
        self.history[self._free[-1]] = voice.history
        return Tail(self._free.pop())

    def release(self, tail: Tail) -> None:
        self._free.append(tail.slot)

    def history_of(self, slots: Tensor) -> Tensor:
        """Convolution histories of B streams, slots (B,) -> (steps, depth, convolution, R, frame, C)."""
        history = self.history[slots]  # (B, steps, depth, convolution, guidance row, frame, C)
        return history.permute(1, 2, 3, 4, 0, 5, 6).flatten(3, 4)

    def keep_history(self, slots: Tensor, history: Tensor) -> None:
        """The reverse."""
        self.history.index_copy_(0, slots, history.unflatten(3, (2, -1)).permute(4, 0, 1, 2, 3, 5, 6))

    def append(self, row: "Row", index: int, keys: Tensor, values: Tensor) -> None:
        """Put the frames of a solve's stream number `index` of B, (steps, depth, 2 B, H, T, D), into its ring."""
        B = keys.shape[2] // 2  # the stream's two guidance rows are B apart
        count, tail = min(row.frames, self.frames), row.tail
        first = min(count, self.frames - tail.next)  # up to the ring's end; the rest goes to its start
        for ring, new in ((self.keys, keys), (self.values, values)):
            slot, new = ring[tail.slot], new[:, :, index::B, :, row.frames - count : row.frames]
            slot[..., tail.next : tail.next + first, :] = new[..., :first, :]
            slot[..., : count - first, :] = new[..., first:, :]

    def advance(self, row: "Row") -> None:
        """Count the frames that were put into the stream's ring."""
        count, tail = min(row.frames, self.frames), row.tail
        tail.next = (tail.next + count) % self.frames
        tail.frames = min(tail.frames + count, self.frames)


@dataclass(frozen=True)
class Row:
    """One stream of a batch: what it attends to, and how many of the chunk's frames are its own."""

    voice: DiTVoice
    tail: Tail
    frames: int
    start: int  # absolute index of the first of them: where its noise begins


@dataclass(frozen=True)
class Heard:
    """What a prompt leaves behind, see `DiTVoice`."""

    attention: KeyValues
    history: Tensor


class Solve(Protocol):
    """A way to run the solver over rows whose memory lies apart."""

    def listen(self, mu: Tensor, speaker: Tensor, mel: Tensor) -> Heard:
        """A prompt: its encoder output (1, T, mel), projected x-vector (1, mel) and mel (1, T, mel)."""
        ...

    def run(self, rows: list[Row], mu: Tensor) -> Tensor:
        """Encoder output mu (B, T, mel) -> mel (B, T, mel), lasting until the next call. The rows' rings and
        histories go on from it."""
        ...


class GatheredSolve:
    """Solves batches of chunks on any device, over context that is copied together for each."""

    def __init__(self, solver: DiTSolver, pool: TailPool, noise: NoiseTape):
        self._solver = solver
        self._pool = pool
        self._noise = noise

    def listen(self, mu: Tensor, speaker: Tensor, mel: Tensor) -> Heard:
        T, solver = mu.shape[1], self._solver
        scratch = solver.scratch(solver.no_history(2), T)
        start, frames = torch.zeros(1, dtype=torch.int64, device=mu.device), torch.tensor([T], device=mu.device)
        conditions = solver.conditions(mu, speaker, mel)
        solver.solve(self._noise.gather(start, T), conditions, frames, NoContext(), scratch)
        return Heard(KeyValues(scratch.keys, scratch.values), scratch.next_history)

    def run(self, rows: list[Row], mu: Tensor) -> Tensor:
        T, device = mu.shape[1], mu.device
        frames = torch.tensor([row.frames for row in rows], device=device)
        starts = torch.tensor([row.start for row in rows], device=device)
        slots = torch.tensor([row.tail.slot for row in rows], device=device)
        conditions = self._solver.conditions(mu, torch.cat([row.voice.speaker for row in rows]))
        scratch = self._solver.scratch(self._pool.history_of(slots), T)
        context = GatheredContext(self._pool, rows, T)
        mel = self._solver.solve(self._noise.gather(starts, T), conditions, frames, context, scratch)
        self._pool.keep_history(slots, scratch.next_history)
        for index, row in enumerate(rows):
            self._pool.append(row, index, scratch.keys, scratch.values)
            self._pool.advance(row)
        return mel


class NoContext:
    """For prompts, which attend to themselves alone."""

    def attend(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)  # (R, H, T, D) -> (R, T, H * D)


class GatheredContext:
    """Context copied into one padded tensor per solve: for CPUs, and what the fused kernel is checked against."""

    def __init__(self, pool: TailPool, rows: list[Row], frames: int):
        lengths = [row.voice.frames + row.tail.frames for row in rows]
        steps, depth, _, H, _, D = rows[0].voice.attention.keys.shape
        shape = (steps, depth, 2 * len(rows), H, max(lengths), D)
        self._keys = pool.keys.new_zeros(shape)
        self._values = pool.keys.new_zeros(shape)
        visible = torch.zeros(2 * len(rows), max(lengths) + frames, dtype=torch.bool, device=pool.keys.device)
        for index, row in enumerate(rows):
            both = [index, len(rows) + index]
            P, length = row.voice.frames, lengths[index]
            prompt = row.voice.attention
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


class ChunkwiseSolve:
    """Solves with an estimator that another runtime computes, chunk by chunk: rows of equal sizes share a batch."""

    def __init__(self, network: DiTFlow, pool: TailPool, noise: NoiseTape):
        self._decoder = network.decoder
        self._pool = pool
        self._noise = noise

    def listen(self, mu: Tensor, speaker: Tensor, mel: Tensor) -> Heard:
        steps = self._pool.keys.shape[1]
        caches = self._decoder.estimator.empty_cache(steps, rows=2).with_room(mu.shape[1])
        starts = torch.zeros(1, dtype=torch.int64, device=mu.device)
        self._advance(caches, starts, mu, speaker, mel)
        return Heard(caches.attention, caches.conv.transpose(-1, -2).contiguous())  # (.., C, frame) -> (.., frame, C)

    def run(self, rows: list[Row], mu: Tensor) -> Tensor:
        mel = torch.zeros(mu.shape, device=mu.device)
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            groups[row.voice.frames + row.tail.frames, row.frames].append(index)
        for (_, frames), members in groups.items():
            mel[members, :frames] = self._solve([rows[index] for index in members], mu[members, :frames])
        return mel

    def _solve(self, rows: list[Row], mu: Tensor) -> Tensor:
        """(B, T, mel) -> (B, T, mel)"""
        T, pool = mu.shape[1], self._pool
        slots = torch.tensor([row.tail.slot for row in rows], device=mu.device)
        starts = torch.tensor([row.start for row in rows], device=mu.device)
        history = pool.history_of(slots).transpose(-1, -2)  # (.., R, frame, C) -> (.., R, C, frame)
        caches = EstimatorCache(self._context(rows), history).with_room(T)
        mel = self._advance(caches, starts, mu, torch.cat([row.voice.speaker for row in rows]), torch.zeros_like(mu))
        pool.keep_history(slots, caches.conv.transpose(-1, -2))
        keys, values = (x[..., -T:, :] for x in (caches.attention.keys, caches.attention.values))
        for index, row in enumerate(rows):
            pool.append(row, index, keys, values)
            pool.advance(row)
        return mel

    def _advance(self, caches: EstimatorCache, starts: Tensor, mu: Tensor, speaker: Tensor, known: Tensor) -> Tensor:
        """mu and the known mel (B, T, mel) -> mel (B, T, mel); fills the room at the caches' end."""
        estimator = self._decoder.estimator
        mel = self._decoder.solve(
            lambda step, x, t, mu, speaker, known: estimator.forward_chunk(x, t, mu, speaker, known, caches[step]),
            self._noise.gather(starts, mu.shape[1]).transpose(1, 2),  # (B, T, mel) -> (B, mel, T)
            mu.transpose(1, 2),
            speaker,
            known.transpose(1, 2),
            steps=caches.conv.shape[0],
        )
        return mel.transpose(1, 2)  # (B, mel, T) -> (B, T, mel)

    def _context(self, rows: list[Row]) -> KeyValues:
        """What the rows attend to, copied together: (steps, depth, 2 B, H, K, D)."""
        prompts, pool = [row.voice.attention for row in rows], self._pool
        return KeyValues(
            _together(rows, [prompt.keys for prompt in prompts], pool.keys),
            _together(rows, [prompt.values for prompt in prompts], pool.values),
        )


def _together(rows: list[Row], prompts: list[Tensor], rings: Tensor) -> Tensor:
    """(steps, depth, 2, H, K, D) of each stream -> (steps, depth, 2 B, H, K, D), the conditional rows first"""
    contexts = [
        torch.cat([prompt, rings[row.tail.slot, ..., : row.tail.frames, :]], dim=-2)
        for row, prompt in zip(rows, prompts, strict=True)
    ]
    return torch.stack(contexts, dim=3).flatten(2, 3)
