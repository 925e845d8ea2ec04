"""Step-Audio2's flow over many streams: the solve of its DiT, seven operations per block, and what a stream keeps."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cosyvoice_triton.constants import CONTEXT_TOKENS, EULER_STEPS, LOOKAHEAD_TOKENS, TOKEN_MEL_RATIO
from cosyvoice_triton.networks.flow.checkpoint import load_dit_flow
from cosyvoice_triton.networks.flow.dit import DiTBlock, DiTEstimator, DiTFlow
from cosyvoice_triton.networks.flow.layers import by_taps
from cosyvoice_triton.token2wav.flow.base import FlowOptions
from cosyvoice_triton.token2wav.flow.cached_flow import CachedStreaming
from cosyvoice_triton.token2wav.flow.cached_solver import (
    NORM_EPS,
    CachedSolver,
    InputOutputProjections,
    Operations,
    Rows,
)
from cosyvoice_triton.token2wav.flow.dit_runtime import ChunkwiseSolve
from cosyvoice_triton.token2wav.flow.encoder_window import Window, with_ahead
from cosyvoice_triton.token2wav.flow.kv_cache import CachedStream, PromptCaches, Row
from cosyvoice_triton.token2wav.flow.solve import Solve
from cosyvoice_triton.token2wav.gpu.limits import DIT_FRAMES
from cosyvoice_triton.token2wav.gpu.noise import flow_noise
from cosyvoice_triton.token2wav.stream import Chunk
from cosyvoice_triton.voice.prompt import Prompt


class BlockWeights(NamedTuple):
    """Weights of one block; matrices are (out, in)."""

    qkv: Tensor
    qkv_bias: Tensor
    qk_norm: Tensor  # (2, 2, D): scale and shift of the queries' norm, then of the keys'
    proj: Tensor
    proj_bias: Tensor
    conv1: Tensor  # (C, 3 C): taps side by side, oldest first
    conv1_bias: Tensor
    norm: Tensor
    norm_bias: Tensor
    conv2: Tensor
    conv2_bias: Tensor
    fc1: Tensor
    fc1_bias: Tensor
    fc2: Tensor
    fc2_bias: Tensor


class Modulation(NamedTuple):
    """adaLN's constants of one block at one Euler step, (C,) each; the scales include the added 1."""

    attn_shift: Tensor
    attn_scale: Tensor
    attn_gate: Tensor
    mlp_shift: Tensor
    mlp_scale: Tensor
    mlp_gate: Tensor
    conv_shift: Tensor
    conv_scale: Tensor
    conv_gate: Tensor


class DiTSolver(CachedSolver):
    """Solves by Step-Audio2's DiT."""

    def __init__(self, network: DiTFlow, operations: Operations, steps: int = EULER_STEPS):
        estimator = network.decoder.estimator
        assert isinstance(estimator, DiTEstimator)
        blocks: list[Any] = list(estimator.blocks)
        self._blocks = [_block_weights(block) for block in blocks]
        projection, last = estimator.in_proj, estimator.final_layer
        times = torch.tensor(network.decoder.schedule(steps)[0], device=projection.weight.device)
        embedded = estimator.t_embedder(times, projection.weight.dtype)  # (steps, C)
        modulation = [block.adaLN_modulation(embedded).unflatten(-1, (9, -1)) for block in blocks]
        parts = torch.stack(modulation, dim=1)  # (steps, depth, 9, C): shift, scale, gate of each part
        parts[:, :, 1::3] += 1
        self._modulation = [[Modulation(*of.unbind(0)) for of in step.unbind(0)] for step in parts.unbind(0)]
        shift, scale = last.adaLN_modulation(embedded).chunk(2, dim=-1)
        ends = InputOutputProjections(
            projection.weight, projection.bias, last.linear.weight, last.linear.bias, 1 + scale, shift
        )
        super().__init__(estimator.config, ends, operations, network.decoder, steps)

    def _block(self, h: Tensor, step: int, layer: int, rows: Rows) -> Tensor:
        w, m, scratch = self._blocks[layer], self._modulation[step][layer], rows.scratch
        linear = partial(self._operations.linear, frames=rows.frames)
        keys, values = scratch.keys[layer], scratch.values[layer]
        q = torch.empty_like(keys)
        attn, conv, mlp = (m.attn_scale, m.attn_shift), (m.conv_scale, m.conv_shift), (m.mlp_scale, m.mlp_shift)
        linear(h, w.qkv, w.qkv_bias, norm=attn, eps=NORM_EPS, heads=(q, keys, values), qk_norm=w.qk_norm)
        attended = rows.context.attend(step, layer, q, keys, values)
        linear(attended, w.proj, w.proj_bias, gate=m.attn_gate, add_to=h)

        history, following = scratch.history[step, layer], scratch.next_history[step, layer]
        first, second = (history[0], following[0], rows.kept), (history[1], following[1], rows.kept)
        y = linear(h, w.conv1, w.conv1_bias, norm=conv, eps=NORM_EPS, history=first)
        norm = (w.norm, w.norm_bias)
        linear(y, w.conv2, w.conv2_bias, norm=norm, mish=True, history=second, gate=m.conv_gate, add_to=h)

        y = linear(h, w.fc1, w.fc1_bias, norm=mlp, eps=NORM_EPS, activation="gelu_tanh")
        return linear(y, w.fc2, w.fc2_bias, gate=m.mlp_gate, add_to=h)


def _block_weights(block: DiTBlock) -> BlockWeights:
    attention, mlp = block.attn, block.mlp
    projections = (attention.to_q, attention.to_k, attention.to_v)
    conv: dict[str, Any] = dict(block.conv.block.items())
    return BlockWeights(
        qkv=torch.cat([p.weight for p in projections]),
        qkv_bias=torch.cat([p.bias for p in projections]),
        qk_norm=torch.stack([torch.stack([norm.weight, norm.bias]) for norm in (attention.q_norm, attention.k_norm)]),
        proj=attention.proj.weight,
        proj_bias=attention.proj.bias,
        conv1=by_taps(conv["1"].weight),
        conv1_bias=conv["1"].bias,
        norm=conv["3"].weight,
        norm_bias=conv["3"].bias,
        conv2=by_taps(conv["6"].weight),
        conv2_bias=conv["6"].bias,
        fc1=mlp.fc1.weight,
        fc1_bias=mlp.fc1.bias,
        fc2=mlp.fc2.weight,
        fc2_bias=mlp.fc2.bias,
    )


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

    def __init__(
        self, network: DiTFlow, *shared: Any, context_tokens: int = CONTEXT_TOKENS, **options: Any
    ):  # fmt: skip
        self._context = context_tokens
        super().__init__(network, *shared, **options)

    @property
    def batch_tokens(self) -> int:
        return self.limits.profile.limits.dit_batch_tokens

    def _solver(self, operations: Operations) -> CachedSolver:
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

    def _plain(self, network: Any) -> "DiTStreaming":
        flow = super()._plain(network)
        flow._context = self._context
        return flow


def _prompt_window(tokens: np.ndarray) -> Window:
    """As in upstream's setup_cache, the look-ahead after the prompt's last tokens is its own first ones."""
    count = len(tokens)
    return Window(with_ahead(np.concatenate([tokens, tokens]), count), np.full(count, count))
