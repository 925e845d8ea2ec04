"""The solve of a batch whose streams keep their keys and values apart, in plain PyTorch on any device.

`cached_graphs` has that of GPUs.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cosyvoice_triton.networks.flow.cache import KeyValues
from cosyvoice_triton.networks.flow.layers import attention_mask, merge_heads
from cosyvoice_triton.token2wav.flow.cached_solver import CachedSolver
from cosyvoice_triton.token2wav.flow.kv_cache import CachedStream, Prefilled, Row, StreamCachePool
from cosyvoice_triton.token2wav.gpu.noise import NoiseTape


class Solve(Protocol):
    """A way to run the Euler solve of a batch whose streams keep their keys and values apart."""

    def prefill(self, mu: Tensor, speaker: Tensor, mel: Tensor, frames: Sequence[int]) -> list[Prefilled]:
        """Run the estimator over prompts, and return what each leaves.

        mu (B, T, mel): encoder output, speaker (B, mel): projected x-vectors, mel (B, T, mel): the prompts' own.
        frames (B): length of each; the rest of a row is padding.
        """
        ...

    def run(self, streams: Sequence[CachedStream], rows: Sequence[Row], mu: Tensor, known: Tensor | None) -> Tensor:
        """Compute the mel of each stream's row from its encoder output: mu (B, T, mel) -> mel (B, T, mel), valid until
        the next call. Updates the streams' rings and convolution histories.

        known (B, T, mel): the mel of those frames that are of a prompt, 0 for others; None: there are none.
        """
        ...


class GatheredSolve:
    """The solve on any device: the context of a batch is gathered into one padded tensor."""

    def __init__(self, solver: CachedSolver, pool: StreamCachePool, noise: NoiseTape):
        self._solver = solver
        self._pool = pool
        self._noise = noise

    def prefill(self, mu: Tensor, speaker: Tensor, mel: Tensor, frames: Sequence[int]) -> list[Prefilled]:
        (B, T, _), solver = mu.shape, self._solver
        starts, lengths = torch.zeros(B, dtype=torch.int64, device=mu.device), torch.tensor(frames, device=mu.device)
        prompts = [self._pool.empty_attention(count) for count in frames]
        context = NoContext(lengths.repeat(self._pool.rows), T, prompts, self._pool)
        rows = solver.rows(starts, lengths, lengths, T, context, solver.no_history(B))
        solver.solve(self._noise.gather(starts, T), solver.conditions(mu, speaker, mel), rows)
        return prefilled(prompts, rows.scratch.next_history, self._pool.rows)

    def run(self, streams: Sequence[CachedStream], rows: Sequence[Row], mu: Tensor, known: Tensor | None) -> Tensor:
        T, solver = mu.shape[1], self._solver
        numbers, speakers = [], []
        for stream, row in zip(streams, rows, strict=True):
            numbers.append([row.start, row.frames, row.kept, stream.cache.slot])
            speakers.append(stream.prompt.speaker)
        starts, frames, kept, slots = torch.tensor(numbers, device=mu.device).unbind(1)
        conditions = solver.conditions(mu, torch.cat(speakers), known)
        context = GatheredContext(self._pool, streams, rows, frames, T)
        computed = solver.rows(starts, frames, kept, T, context, self._pool.history_of(slots))
        mel = solver.solve(self._noise.gather(starts, T), conditions, computed)
        self._pool.keep_history(slots, computed.scratch.next_history)
        for stream, row in zip(streams, rows, strict=True):
            self._pool.advance(stream.cache, row)
        return mel


def prefilled(prompts: Sequence[KeyValues], history: Tensor, rows: int) -> list[Prefilled]:
    """Return what a prefill of B prompts, or more of which the first B count, leaves of each: keys and values, and its
    part of the convolutions' history (steps, pairs, convolution, R, frame, C), copied. rows: of each prompt."""
    streams = history.shape[3] // rows
    return [
        Prefilled(attention, history[:, :, :, [index + row * streams for row in range(rows)]])
        for index, attention in enumerate(prompts)
    ]


def own_mask(frames: Tensor, longest: int, mask_chunk: int) -> Tensor:
    """Return which of its own `longest` frames each frame of a row attends to: frames (R,) -> (R, 1 or T, T) bool."""
    visible = torch.arange(longest, device=frames.device) < frames[:, None, None]  # (R, 1, T)
    return attention_mask(visible, mask_chunk or None)[:, 0]


class NoContext:
    """The context of a prefill: prompts attend to themselves only, and are kept in `prompts`.

    frames (R,): their lengths in rows of `longest` frames.
    """

    def __init__(self, frames: Tensor, longest: int, prompts: Sequence[KeyValues], pool: StreamCachePool):
        visible = own_mask(frames, longest, pool.mask_chunk)
        self._mask = None if visible.all() else visible[:, None]  # (R, 1, 1 or T, T)
        self._prompts, self._stored = prompts, pool.stored

    def attend(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask))

    def keep(self, step: int, keys: Tensor, values: Tensor) -> None:
        B = len(self._prompts)
        for index, prompt in enumerate(self._prompts):
            prompt.keys[step] = self._stored(keys[:, index::B, :, : prompt.frames])
            prompt.values[step] = self._stored(values[:, index::B, :, : prompt.frames])


class GatheredContext:
    """Context copied into one padded tensor per solve: for CPUs, and the reference of the fused kernel's tests."""

    def __init__(
        self, pool: StreamCachePool, streams: Sequence[CachedStream], rows: Sequence[Row], frames: Tensor, T: int
    ):
        """Gather the context of rows of `frames` (B,), at most T each."""
        B = len(streams)
        self._pool, self._streams, self._rows = pool, streams, rows
        longest = max(stream.prompt.frames + stream.cache.frames for stream in streams)
        steps, depth, per_stream, H, _, row = streams[0].prompt.attention.keys.shape
        shape = (steps, depth, R := per_stream * B, H, longest, row)
        gathered = pool.keys.new_zeros(2, *shape)
        before = torch.zeros(R, 1, longest, dtype=torch.bool, device=pool.keys.device)
        for index, stream in enumerate(streams):
            own_rows = slice(index, None, B)
            prompt, stream_cache = stream.prompt, stream.cache
            P, length = prompt.frames, prompt.frames + stream_cache.frames
            for out, of_prompt, of_ring in (
                (gathered[0], prompt.attention.keys, pool.keys),
                (gathered[1], prompt.attention.values, pool.values),
            ):
                out[:, :, own_rows, :, :P] = of_prompt
                out[:, :, own_rows, :, P:length] = of_ring[stream_cache.slot, ..., : stream_cache.frames, :]
            before[own_rows, :, :length] = True
        self.keys, self.values = pool.loaded(gathered)
        own = own_mask(frames.repeat(per_stream), T, pool.mask_chunk)
        visible = torch.cat([before.expand(-1, own.shape[1], -1), own], dim=2)
        self._mask = None if visible.all() else visible[:, None]  # (R, 1, 1 or T, K)

    def attend(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = torch.cat([self.keys[step, layer], k], dim=2)
        values = torch.cat([self.values[step, layer], v], dim=2)
        return merge_heads(F.scaled_dot_product_attention(q, keys, values, attn_mask=self._mask))

    def keep(self, step: int, keys: Tensor, values: Tensor) -> None:
        for index, (stream, row) in enumerate(zip(self._streams, self._rows, strict=True)):
            self._pool.append(stream.cache, row, index, step, keys, values)
