"""The DiT's solve with an estimator that another runtime than torch computes."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from cosyvoice_triton.networks.flow.cache import EstimatorCache, KeyValues
from cosyvoice_triton.networks.flow.dit import DiTFlow
from cosyvoice_triton.token2wav.flow.kv_cache import CachedStream, Prefilled, Row, StreamCachePool
from cosyvoice_triton.token2wav.flow.solve import GatheredContext
from cosyvoice_triton.token2wav.gpu.noise import NoiseTape


class ChunkwiseSolve:
    """The solve with an estimator that another runtime computes: rows of equal sizes share a batch."""

    def __init__(self, network: DiTFlow, pool: StreamCachePool, noise: NoiseTape):
        self._decoder = network.decoder
        self._pool = pool
        self._noise = noise

    def prefill(self, mu: Tensor, speaker: Tensor, mel: Tensor, frames: Sequence[int]) -> list[Prefilled]:
        left = []
        for index, count in enumerate(frames):  # of different lengths, which the estimator cannot take in one batch
            row = slice(index, index + 1)
            caches = self._decoder.estimator.empty_cache(self._pool.keys.shape[1], rows=self._pool.rows).with_room(
                count
            )
            starts = torch.zeros(1, dtype=torch.int64, device=mu.device)
            self._advance(caches, starts, mu[row, :count], speaker[row], mel[row, :count])
            history = caches.conv.transpose(-1, -2).contiguous()  # (.., C, frame) -> (.., frame, C)
            attention = (self._pool.stored(x) for x in (caches.attention.keys, caches.attention.values))
            left.append(Prefilled(KeyValues(*attention), history))
        return left

    def run(self, streams: Sequence[CachedStream], rows: Sequence[Row], mu: Tensor, known: Tensor | None) -> Tensor:
        mel = torch.zeros(mu.shape, device=mu.device)
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, (stream, row) in enumerate(zip(streams, rows, strict=True)):
            groups[stream.prompt.frames + stream.cache.frames, row.frames].append(index)
        for (_, frames), members in groups.items():
            of = [streams[index] for index in members], [rows[index] for index in members]
            mel[members, :frames] = self._solve(*of, mu[members, :frames])
        return mel

    def _solve(self, streams: Sequence[CachedStream], rows: Sequence[Row], mu: Tensor) -> Tensor:
        """Solve: encoder output (B, T, mel) -> mel (B, T, mel)."""
        T, pool = mu.shape[1], self._pool
        slots = torch.tensor([stream.cache.slot for stream in streams], device=mu.device)
        starts = torch.tensor([row.start for row in rows], device=mu.device)
        history = pool.history_of(slots).transpose(-1, -2)  # (.., R, frame, C) -> (.., R, C, frame)
        context = GatheredContext(pool, streams, rows, torch.full_like(starts, T), T)
        caches = EstimatorCache(KeyValues(context.keys, context.values), history).with_room(T)
        speaker = torch.cat([stream.prompt.speaker for stream in streams])
        mel = self._advance(caches, starts, mu, speaker, torch.zeros_like(mu))
        pool.keep_history(slots, caches.conv.transpose(-1, -2))
        keys, values = (x[..., -T:, :] for x in (caches.attention.keys, caches.attention.values))
        for step in range(len(keys)):
            context.keep(step, keys[step], values[step])
        for stream, row in zip(streams, rows, strict=True):
            pool.advance(stream.cache, row)
        return mel

    def _advance(self, caches: EstimatorCache, starts: Tensor, mu: Tensor, speaker: Tensor, known: Tensor) -> Tensor:
        """Solve: mu and the known mel (B, T, mel) -> mel (B, T, mel). Fills the last T frames of the caches."""
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
