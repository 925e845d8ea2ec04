"""What a stream carries from one chunk to the next. Passed in and returned; no network keeps any of it.

A cache handed to a network is never changed: the network copies it into buffers with room for the new frames and
writes those in place, so that streams of one voice can start from the same prompt cache.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.flow.config import DiTConfig

CONV_HISTORY = 2  # frames that the DiT's causal convolutions, of kernel 3, need from before their first


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of attention layers in time order, (..., B, H, T, D). Indexing takes a layer (or Euler step)."""

    keys: Tensor
    values: Tensor

    @property
    def frames(self) -> int:
        return self.keys.shape[-2]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def __getitem__(self, index: int) -> "KeyValues":
        return KeyValues(self.keys[index], self.values[index])

    def with_room(self, frames: int) -> "KeyValues":
        """A copy that is `frames` longer; the new frames are for `write`."""
        return KeyValues(_with_room(self.keys, frames), _with_room(self.values, frames))

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put the newest frames (B, H, n, D) in the last n places; returns all keys and values of this layer."""
        frames = keys.shape[-2]
        self.keys[..., -frames:, :] = keys
        self.values[..., -frames:, :] = values
        return self.keys, self.values

    def trimmed(self, head: int, tail: int) -> "KeyValues":
        """The first `head` and the last `tail` frames, in time order."""
        if self.frames <= head + tail:
            return self
        return KeyValues(_ends(self.keys, head, tail), _ends(self.values, head, tail))


@dataclass(frozen=True)
class EncoderCache:
    """State of the chunk-wise encoder."""

    lookahead: Tensor  # (B, C, 2): last inputs of the look-ahead layer's second convolution
    upsample: Tensor  # (B, C, 2 * ratio): last inputs of the upsampling convolution, at mel rate
    tokens: KeyValues  # (blocks, B, H, tokens, D)
    frames: KeyValues  # (up_blocks, B, H, frames, D)

    @property
    def nbytes(self) -> int:
        return self.lookahead.nbytes + self.upsample.nbytes + self.tokens.nbytes + self.frames.nbytes

    def with_room(self, tokens: int, frames: int) -> "EncoderCache":
        return EncoderCache(
            self.lookahead.clone(), self.upsample.clone(), self.tokens.with_room(tokens), self.frames.with_room(frames)
        )


@dataclass(frozen=True)
class EstimatorCache:
    """State of the chunk-wise DiT; rows are those of the guidance batch. Indexing takes an Euler step, then a layer."""

    attention: KeyValues  # (steps, depth, rows, H, T, D)
    conv: Tensor  # (steps, depth, 2 convolutions, rows, C, kernel - 1)

    @classmethod
    def empty(
        cls, config: DiTConfig, steps: int, rows: int, device: torch.device, dtype: torch.dtype
    ) -> "EstimatorCache":
        """The cache of streams that have not begun."""
        keys = torch.empty(steps, config.depth, rows, config.heads, 0, config.head_dim, device=device, dtype=dtype)
        conv = torch.zeros(steps, config.depth, 2, rows, config.width, CONV_HISTORY, device=device, dtype=dtype)
        return cls(KeyValues(keys, keys), conv)

    @property
    def nbytes(self) -> int:
        return self.attention.nbytes + self.conv.nbytes

    def __getitem__(self, index: int) -> "EstimatorCache":
        return EstimatorCache(self.attention[index], self.conv[index])

    def with_room(self, frames: int) -> "EstimatorCache":
        return EstimatorCache(self.attention.with_room(frames), self.conv.clone())


@dataclass(frozen=True)
class DiTFlowCache:
    """All that a stream of the DiT flow carries."""

    encoder: EncoderCache
    estimator: EstimatorCache
    speaker: Tensor  # (B, mel bins): projected x-vector
    prompt_frames: int
    frames: int  # mel frames so far, prompt included: where the next chunk's noise starts

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return self.encoder.nbytes + self.estimator.nbytes + self.speaker.nbytes

    def trimmed(self, tail_frames: int) -> "DiTFlowCache":
        """Bound the estimator's keys to the whole prompt and the `tail_frames` most recent frames.

        The encoder keeps everything: its state is small, and its relative positions count from the stream's start.
        """
        attention = self.estimator.attention.trimmed(self.prompt_frames, tail_frames)
        return replace(self, estimator=replace(self.estimator, attention=attention))


def _with_room(x: Tensor, frames: int) -> Tensor:
    *lead, T, D = x.shape
    longer = x.new_empty(*lead, T + frames, D)
    longer[..., :T, :] = x
    return longer


def _ends(x: Tensor, head: int, tail: int) -> Tensor:
    T = x.shape[-2]
    return torch.cat([x[..., :head, :], x[..., T - tail :, :]], dim=-2)
