"""Step-Audio2's flow over many streams: the solve of its DiT, seven operations per block, and what a stream keeps."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cosyvoice_triton.constants import CONTEXT_TOKENS, EULER_STEPS, LOOKAHEAD_TOKENS, TOKEN_MEL_RATIO
from cosyvoice_triton.networks.flow.cache import EstimatorCache, KeyValues
from cosyvoice_triton.networks.flow.checkpoint import load_dit_flow
from cosyvoice_triton.networks.flow.dit import DiTEstimator, DiTFlow
from cosyvoice_triton.networks.flow.layers import by_taps, weights
from cosyvoice_triton.token2wav.flow import cached_solver
from cosyvoice_triton.token2wav.flow.base import FlowOptions
from cosyvoice_triton.token2wav.flow.cached_flow import CachedStreaming
from cosyvoice_triton.token2wav.flow.encoder_window import Window, with_ahead
from cosyvoice_triton.token2wav.flow.kv_cache import CachedStream, Prefilled, PromptCaches, Row, StreamCachePool
from cosyvoice_triton.token2wav.flow.solve import GatheredContext, Solve
from cosyvoice_triton.token2wav.gpu.limits import DIT_FRAMES
from cosyvoice_triton.token2wav.gpu.noise import NoiseTape, flow_noise
from cosyvoice_triton.token2wav.stream import Chunk
from cosyvoice_triton.voice.prompt import Prompt


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


class DiTSolver(cached_solver.CachedSolver):
    """Solves by Step-Audio2's DiT."""

    def __init__(self, network: DiTFlow, operations: cached_solver.Operations, steps: int = EULER_STEPS):
        estimator = network.decoder.estimator
        assert isinstance(estimator, DiTEstimator)
        blocks: list[Any] = list(estimator.blocks)
        self._blocks = [FusedBlock(block) for block in blocks]
        projection, last = estimator.in_proj, estimator.final_layer
        times = torch.tensor(network.decoder.schedule(steps)[0], device=projection.weight.device)
        embedded = estimator.t_embedder(times, projection.weight.dtype)  # (steps, C)
        modulation = [block.adaLN_modulation(embedded).unflatten(-1, (3, 3, -1)) for block in blocks]
        parts = torch.stack(modulation, dim=1)  # (steps, depth, 3, 3, C): shift, scale, gate of each part
        parts[:, :, :, 1] += 1
        self._modulation = [[[cached_solver.Modulation(*part) for part in block] for block in step] for step in parts]
        shift, scale = last.adaLN_modulation(embedded).chunk(2, dim=-1)
        ends = cached_solver.InputOutputProjections(
            projection.weight, projection.bias, last.linear.weight, last.linear.bias, 1 + scale, shift
        )
        super().__init__(estimator.config, ends, operations, network.decoder, steps)

    def _block(self, h: Tensor, step: int, layer: int, rows: cached_solver.Rows) -> Tensor:
        w, (attn, mlp, conv), scratch = self._blocks[layer], self._modulation[step][layer], rows.scratch
        linear = partial(self._operations.linear, frames=rows.frames)
        keys, values = scratch.keys[layer], scratch.values[layer]
        q = torch.empty_like(keys)
        linear(h, *w.qkv, norm=attn.norm, eps=cached_solver.NORM_EPS, heads=(q, keys, values), qk_norm=w.qk_norm)
        attended = rows.context.attend(step, layer, q, keys, values)
        linear(attended, *w.proj, gate=attn.gate, add_to=h)

        history, following = scratch.history[step, layer], scratch.next_history[step, layer]
        first, second = (history[0], following[0], rows.kept), (history[1], following[1], rows.kept)
        y = linear(h, *w.conv1, norm=conv.norm, eps=cached_solver.NORM_EPS, history=first)
        linear(y, *w.conv2, norm=w.norm, mish=True, history=second, gate=conv.gate, add_to=h)

        y = linear(h, *w.fc1, norm=mlp.norm, eps=cached_solver.NORM_EPS, activation="gelu_tanh")
        return linear(y, *w.fc2, gate=mlp.gate, add_to=h)


class FusedBlock:
    """A `DiTBlock` as the operations take it: weight and bias of each product; convolutions (C, 3 C), taps side by side
    and the oldest first. qk_norm (2, 2, D): scale and shift of the queries' norm, then of the keys'."""

    def __init__(self, block: Any) -> None:
        attention, conv = block.attn, block.conv.block
        projections = attention.to_q, attention.to_k, attention.to_v
        self.qkv = torch.cat([part.weight for part in projections]), torch.cat([part.bias for part in projections])
        self.qk_norm = torch.stack([torch.stack(weights(norm)) for norm in (attention.q_norm, attention.k_norm)])
        self.conv1, self.conv2 = ((by_taps(conv[key].weight), conv[key].bias) for key in ("1", "6"))
        self.norm = weights(conv["3"])
        self.proj, self.fc1, self.fc2 = map(weights, (attention.proj, block.mlp.fc1, block.mlp.fc2))


def load(path: Path, options: FlowOptions) -> "DiTStreaming":
    """Load the flow of a `flow.pt`, and the runtime's files next to it. ValueError names what does not fit."""
    network, shared = options.load(load_dit_flow, path)
    prompts = PromptCaches(options.prompt_cache_bytes)
    return DiTStreaming(network, flow_noise(options.device), prompts, kv_cache_dtype=options.kv_cache_dtype, **shared)


@dataclass(kw_only=True)
class DiTStream(CachedStream):
    """A stream of the DiT flow."""

    context: np.ndarray  # (n,) its recent tokens, look-ahead excluded, as far as the encoder's window holds them
    chunk_ends: list[int]  # how many tokens were rendered after each of its chunks

    @property
    def complete(self) -> bool:
        """Return whether the stream cache still holds every frame."""
        return self.cache.frames == TOKEN_MEL_RATIO * self.rendered


DiTChunk = Chunk[DiTStream]


class DiTStreaming(CachedStreaming[DiTStream]):
    """Streams Step-Audio2's flow. context_tokens: so many recent tokens of a stream are kept for the encoder."""

    cumulative = False
    graph_frames = DIT_FRAMES
    _network: DiTFlow

    def __init__(self, network: DiTFlow, *shared: Any, context_tokens: int = CONTEXT_TOKENS, **options: Any):
        self._context = context_tokens
        super().__init__(network, *shared, **options)

    @property
    def batch_tokens(self) -> int:
        return self.limits.profile.limits.dit_batch_tokens

    def _solver(self, operations: cached_solver.Operations) -> cached_solver.CachedSolver:
        return DiTSolver(self._network, operations, self._steps)

    def _plain_solve(self) -> Solve:
        if not isinstance(self._network.decoder.estimator, DiTEstimator):
            return ChunkwiseSolve(self._network, self._pool, self._noise)
        return super()._plain_solve()

    def _stream(self, **parts: Any) -> DiTStream:
        return DiTStream(**parts, context=np.zeros(0, np.int64), chunk_ends=[])

    def _computed(self, stream: DiTStream, new: int) -> int:
        return new

    def _prompt_window(self, prompt: Prompt) -> Window:
        return _prompt_window(prompt.tokens)

    def _window(self, chunk: DiTChunk, row: Row) -> Window:
        """A chunk attends to itself and to all before it. The look-ahead after the prompt is as in `_prompt_window`."""
        stream, prompt = chunk.stream, chunk.stream.prompt.voice.tokens
        tokens = np.concatenate([stream.context, chunk.tokens])
        count = len(stream.context) + chunk.new
        forgotten = chunk.offset - len(stream.context)
        ends = np.array([*stream.chunk_ends, chunk.offset + chunk.new])
        ends = ends[np.searchsorted(ends, forgotten + np.arange(count), side="right")]  # the end of each token's chunk
        return Window(
            tokens=np.concatenate([_prompt_window(prompt).tokens, with_ahead(tokens, count)]),
            visible=len(prompt) + np.concatenate([np.zeros_like(prompt), ends - forgotten]),
        )

    def _render(self, chunks: list[DiTChunk]) -> list[Tensor]:
        mels = super()._render(chunks)
        for chunk in chunks:
            stream = chunk.stream
            stream.context = np.concatenate([stream.context, chunk.tokens[: chunk.new]])[-self._context :]
            stream.chunk_ends.append(chunk.offset + chunk.new)
        return mels

    def _again(self, chunk: DiTChunk) -> Tensor:
        """Render all chunks that the stream's context still holds, the given one last."""
        exact, stream = self.exact(), chunk.stream
        (prompt,) = exact._prefill([stream.prompt.voice])
        before = stream.context[: max(0, len(stream.context) - chunk.new)]
        begin = chunk.offset - len(before)
        stream_cache = exact._pool.acquire(prompt)
        stream_cache.total = TOKEN_MEL_RATIO * begin
        anew = replace(
            stream, prompt=prompt, cache=stream_cache, context=np.zeros(0, np.int64), chunk_ends=[], rendered=begin
        )
        tokens = np.concatenate([before, chunk.tokens])
        for end in [end for end in stream.chunk_ends if end > begin]:
            offset = anew.rendered
            ahead = tokens[offset - begin : end - begin + LOOKAHEAD_TOKENS]
            new = end - offset
            (mel,) = exact.render([replace(chunk, stream=anew, tokens=ahead, offset=offset, new=new, computed=new)])
        self._replace(stream, exact, anew)
        return mel

    def _plain(self, network: Any, *shared: Any, **options: Any) -> "DiTStreaming":
        return super()._plain(network, *shared, context_tokens=self._context, **options)


def _prompt_window(tokens: np.ndarray) -> Window:
    """As in upstream's setup_cache, the look-ahead after the prompt's last tokens is its own first ones."""
    count = len(tokens)
    return Window(with_ahead(np.concatenate([tokens, tokens]), count), np.full(count, count))
