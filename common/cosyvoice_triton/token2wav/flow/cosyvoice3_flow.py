"""CosyVoice3's flow over many streams.

The estimator's attention has a mask of chunks of 50 frames, counted from the prompt's first one: a frame attends to its
own chunk and to those before. So the keys and values of whole chunks are final, and kept: of the prompt, per voice,
and of a stream's most recent frames. The frames of the last chunk, while it is not whole, are computed again with those
that follow.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, TOKEN_MEL_RATIO
from cosyvoice_triton.networks.flow.checkpoint import load_cosyvoice3_flow
from cosyvoice_triton.networks.flow.cosyvoice3 import CosyVoice3Flow
from cosyvoice_triton.token2wav.flow.base import FlowOptions
from cosyvoice_triton.token2wav.flow.cached_flow import CachedStreaming
from cosyvoice_triton.token2wav.flow.cached_solver import CachedSolver, Operations
from cosyvoice_triton.token2wav.flow.encoder_window import Window, with_ahead
from cosyvoice_triton.token2wav.flow.kv_cache import CachedChunk, CachedStream, Row
from cosyvoice_triton.token2wav.flow.prompt_caches import PromptCaches
from cosyvoice_triton.token2wav.flow.rotary_solver import RotarySolver
from cosyvoice_triton.token2wav.gpu.limits import COSYVOICE3_FRAMES
from cosyvoice_triton.token2wav.gpu.noise import flow_noise
from cosyvoice_triton.voice.prompt import Prompt

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
