"""What the DiT carries from one chunk of a stream to the next. It is passed in; no network keeps any of it.

The network writes into the cache that it is given. To keep a cache that several streams share, such as a prompt's, pass
a copy from `with_room`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cosyvoice_triton.networks.flow.config import DiTConfig

CONV_HISTORY = DiTConfig.conv_kernel - 1  # frames before a chunk that the DiT's causal convolutions need


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
        """Return a copy that is `frames` longer; `write` fills the new frames."""
        return KeyValues(_with_room(self.keys, frames), _with_room(self.values, frames))

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store n new frames (B, H, n, D) as the last n; return all keys and all values of this layer."""
        frames = keys.shape[-2]
        self.keys[..., -frames:, :] = keys
        self.values[..., -frames:, :] = values
        return self.keys, self.values


@dataclass(frozen=True)
class EstimatorCache:
    """State of the chunk-wise DiT. Rows are those of the guidance batch. Indexing takes an Euler step, then a layer."""

    attention: KeyValues  # (steps, depth, rows, H, T, D)
    conv: Tensor  # (steps, depth, 2 convolutions, rows, C, kernel - 1): the convolutions' last inputs

    @classmethod
    def empty(
        cls, config: DiTConfig, steps: int, rows: int, device: torch.device, dtype: torch.dtype
    ) -> "EstimatorCache":
        """Return the cache of streams that have no frames yet."""
        keys = torch.empty(steps, config.depth, rows, config.heads, 0, config.head_dim, device=device, dtype=dtype)
        conv = torch.zeros(steps, config.depth, 2, rows, config.width, CONV_HISTORY, device=device, dtype=dtype)
        return cls(KeyValues(keys, keys), conv)

    def __getitem__(self, index: int) -> "EstimatorCache":
        return EstimatorCache(self.attention[index], self.conv[index])

    def with_room(self, frames: int) -> "EstimatorCache":
        """Return a copy whose keys and values are `frames` longer."""
        return EstimatorCache(self.attention.with_room(frames), self.conv.clone())


def _with_room(x: Tensor, frames: int) -> Tensor:
    *lead, T, D = x.shape
    longer = x.new_empty(*lead, T + frames, D)
    longer[..., :T, :] = x
    return longer
