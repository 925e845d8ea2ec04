"""CosyVoice3's flow over many streams: the solve of its rotary DiT, and what a stream keeps.

The estimator's attention has a mask of chunks of 50 frames, counted from the prompt's first one: a frame attends to its
own chunk and to those before. So the keys and values of whole chunks are final, and kept: of the prompt, per voice,
and of a stream's most recent frames. The frames of the last chunk, while it is not whole, are computed again with those
that follow.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cosyvoice_triton.constants import EULER_STEPS, LOOKAHEAD_TOKENS, TOKEN_MEL_RATIO
from cosyvoice_triton.networks.flow.checkpoint import load_cosyvoice3_flow
from cosyvoice_triton.networks.flow.cosyvoice3 import CosyVoice3Flow, RotaryDiTEstimator, rotary, rotary_frequencies
from cosyvoice_triton.networks.flow.layers import weights
from cosyvoice_triton.token2wav.flow.base import FlowOptions
from cosyvoice_triton.token2wav.flow.cached_flow import CachedStreaming
from cosyvoice_triton.token2wav.flow.cached_solver import (
    NORM_EPS,
    CachedSolver,
    Context,
    InputOutputProjections,
    Modulation,
    Operations,
    PlainOperations,
    Rows,
)
from cosyvoice_triton.token2wav.flow.encoder_window import Window, with_ahead
from cosyvoice_triton.token2wav.flow.kv_cache import CachedChunk, CachedStream, PromptCaches, Row
from cosyvoice_triton.token2wav.gpu.limits import COSYVOICE3_FRAMES
from cosyvoice_triton.token2wav.gpu.noise import flow_noise
from cosyvoice_triton.voice.prompt import Prompt

MIN_GROUP = 16  # channels of a group for which there is a kernel; small checkpoints have less


class RotarySolver(CachedSolver):
    """Solves by CosyVoice3's rotary DiT."""

    def __init__(self, network: CosyVoice3Flow, operations: Operations, steps: int = EULER_STEPS):
        estimator = network.decoder.estimator
        assert isinstance(estimator, RotaryDiTEstimator)
        blocks: list[Any] = list(estimator.transformer_blocks)
        self._blocks = [FusedRotaryBlock(block) for block in blocks]
        embedding = estimator.input_embed
        weight = embedding.proj.weight
        time = estimator.time_embed(
            torch.tensor(network.decoder.schedule(steps)[0], device=weight.device), weight.dtype
        )
        modulation = [torch.stack(block.attn_norm(time)).squeeze(2).unflatten(0, (2, 3)) for block in blocks]
        parts = torch.stack(modulation)  # (depth, 2, 3, steps, C): shift, scale, gate of each part
        parts[:, :, 1] += 1
        self._modulation = [[[Modulation(*part) for part in block] for block in step] for step in parts.movedim(3, 0)]
        # The network's inputs are noisy mel, known mel, encoder output, speaker.
        ordered = weight.unflatten(1, (4, -1))[:, [0, 2, 3, 1]].flatten(1)
        scale, shift = estimator.norm_out.linear(F.silu(time)).chunk(2, dim=-1)
        last = estimator.proj_out
        ends = InputOutputProjections(ordered, embedding.proj.bias, last.weight, last.bias, 1 + scale, shift)
        super().__init__(estimator.config, ends, operations, network.decoder, steps)
        groups = estimator.config.conv_groups
        convolutions: list[Any] = [layer[0] for layer in cast(Any, embedding.conv_pos_embed.children())]
        self._convolutions = [(_by_group(conv.weight, groups), conv.bias) for conv in convolutions]
        wide = estimator.config.width // groups >= MIN_GROUP
        self._convolve = operations.convolve_groups if wide else PlainOperations.convolve_groups
        self._frequencies = rotary_frequencies(estimator.config.head_dim).to(weight.device)

    def rows(self, starts: Tensor, frames: Tensor, kept: Tensor, T: int, context: Context, history: Tensor) -> Rows:
        rows = super().rows(starts, frames, kept, T, context, history)
        positions = starts[:, None] + torch.arange(T, device=starts.device)
        return replace(rows, rotary=rotary(positions, self._frequencies))

    def _begin(self, h: Tensor, step: int, rows: Rows) -> Tensor:
        old, new = rows.scratch.history[step, 0], rows.scratch.next_history[step, 0]
        y = self._convolve(h, *self._convolutions[0], (old[0], new[0], rows.kept))
        return self._convolve(y, *self._convolutions[1], (old[1], new[1], rows.kept), add_to=h)

    def _block(self, h: Tensor, step: int, layer: int, rows: Rows) -> Tensor:
        w, (attn, ff) = self._blocks[layer], self._modulation[step][layer]
        linear = partial(self._operations.linear, frames=rows.frames)
        keys, values = rows.scratch.keys[layer], rows.scratch.values[layer]
        q = torch.empty_like(keys)
        linear(h, *w.qkv, norm=attn.norm, eps=NORM_EPS, heads=(q, keys, values))
        assert rows.rotary is not None
        self._operations.rotate_first_head(q, keys, rows.rotary)
        attended = rows.context.attend(step, layer, q, keys, values)
        linear(attended, *w.out, gate=attn.gate, add_to=h)
        y = linear(h, *w.widen, norm=ff.norm, eps=NORM_EPS, activation="gelu_tanh")
        return linear(y, *w.narrow, gate=ff.gate, add_to=h)


def _by_group(weight: Tensor, groups: int) -> Tensor:
    """Return the weight by group: (C, G, taps) -> (groups, taps, G in, G out)."""
    return weight.unflatten(0, (groups, -1)).permute(0, 3, 2, 1).contiguous()


class FusedRotaryBlock:
    """A `RotaryDiTBlock` as the operations take it: weight and bias of each product."""

    def __init__(self, block: Any) -> None:
        attention, ((widen, _), _, narrow) = block.attn, block.ff.ff
        projections = attention.to_q, attention.to_k, attention.to_v
        self.qkv = torch.cat([part.weight for part in projections]), torch.cat([part.bias for part in projections])
        self.out, self.widen, self.narrow = map(weights, (attention.to_out[0], widen, narrow))


LOOKBACK_TOKENS = 2  # before a token, that the causal convolution of the look-ahead layer needs


def load(path: Path, options: FlowOptions) -> "CosyVoice3Streaming":
    """Load the flow of a `flow.pt`. ValueError names what does not fit, or a runtime that the flow does not have."""
    network, shared = options.load(load_cosyvoice3_flow, path)
    prompts = PromptCaches(options.prompt_cache_bytes)
    return CosyVoice3Streaming(
        network, flow_noise(options.device), prompts, kv_cache_dtype=options.kv_cache_dtype, **shared
    )


class CosyVoice3Streaming(CachedStreaming[CachedStream]):
    """Streams CosyVoice3's flow.

    Until a frame leaves the stream cache, the mel of whole chunks of the mask equals that of the finished utterance,
    rendered at once under the mask.
    """

    cumulative = True
    graph_frames = COSYVOICE3_FRAMES
    _network: CosyVoice3Flow

    @property
    def batch_tokens(self) -> int:
        return self.limits.profile.limits.cosyvoice3_batch_tokens

    def _solver(self, operations: Operations) -> CachedSolver:
        return RotarySolver(self._network, operations, self._steps)

    def _stream(self, **parts: Any) -> CachedStream:
        return CachedStream(**parts)

    def _prompt_frames(self, prompt: Prompt) -> int:
        """The prompt cache has the whole chunks of the mask whose look-ahead is in the prompt."""
        return self._pool.whole(TOKEN_MEL_RATIO * max(0, len(prompt.tokens) - LOOKAHEAD_TOKENS))

    def _computed(self, stream: CachedStream, new: int) -> int:
        tokens = len(stream.prompt.voice.tokens) + stream.rendered + new
        return tokens - (stream.prompt.frames + stream.cache.total) // TOKEN_MEL_RATIO

    def _prompt_window(self, prompt: Prompt) -> Window:
        return _window(prompt.tokens, self._prompt_frames(prompt) // TOKEN_MEL_RATIO)

    def _window(self, chunk: CachedChunk, row: Row) -> Window:
        voice = chunk.stream.prompt.voice.tokens
        begin = max(0, row.start // TOKEN_MEL_RATIO - LOOKBACK_TOKENS)
        tokens = np.concatenate([voice, chunk.tokens])[begin:]
        return _window(tokens, len(voice) + chunk.offset + chunk.new - begin)

    def _known(self, streams: list[CachedStream], rows: list[Row], mu: Tensor) -> Tensor:
        known = mu.new_zeros(mu.shape)
        for index, (stream, row) in enumerate(zip(streams, rows, strict=True)):
            of_prompt = stream.prompt.rest[row.start - stream.prompt.frames :]
            known[index, : len(of_prompt)] = of_prompt
        return known

    def _again(self, chunk: CachedChunk) -> Tensor:
        """Render it with all frames that its row attended to, in one row."""
        exact, stream = self.exact(), chunk.stream
        (prompt,) = exact._prefill([stream.prompt.voice])
        stream_cache = exact._pool.acquire(prompt)
        before = TOKEN_MEL_RATIO * (len(prompt.voice.tokens) + chunk.offset) - prompt.frames
        stream_cache.total = self._pool.whole(max(0, before - self._pool.frames))
        anew = replace(stream, prompt=prompt, cache=stream_cache, rendered=chunk.offset)
        (mel,) = exact.render([replace(chunk, stream=anew)])
        self._replace(stream, exact, anew)
        return mel


def _window(tokens: np.ndarray, count: int) -> Window:
    return Window(with_ahead(tokens, count), np.full(count, count))
