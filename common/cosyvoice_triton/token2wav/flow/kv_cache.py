"""Keys and values of an estimator: a prompt cache per voice, shared by its streams, and a bounded one per stream.

The cache of a stream is a ring: new frames overwrite the oldest ones in place, so their order there is not that of
time. Positions, if the estimator has any, are in the keys.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cosyvoice_triton.config import KvCacheDtype
from cosyvoice_triton.constants import TOKEN_MEL_RATIO
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.networks.flow.cache import KeyValues
from cosyvoice_triton.networks.flow.config import DiTConfig, RotaryDiTConfig
from cosyvoice_triton.token2wav.flow.prompt_caches import Prefilled, PromptCache
from cosyvoice_triton.token2wav.gpu.quantization import SCALE_BYTES, dequantized, quantized
from cosyvoice_triton.token2wav.stream import Chunk, Stream

CachedConfig = DiTConfig | RotaryDiTConfig


@dataclass
class StreamCache:
    """Where the recent frames of one stream are: a slot of the pool, and how much of its ring is written."""

    slot: int
    frames: int = 0  # written, at most the ring's length
    next: int = 0  # where the next frame goes
    total: int = 0  # frames written since the stream began


@dataclass(kw_only=True)
class CachedStream(Stream):
    """The state of a stream of a flow that keeps keys and values."""

    prompt: PromptCache
    prompt_key: bytes
    cache: StreamCache


CachedChunk = Chunk[CachedStream]


class Row(NamedTuple):
    """The frames that are computed for a chunk: those after the ones that are kept.

    start: index of the first one, counted from the prompt's; its noise and position are those of that index.
    frames: how many. kept: how many of them, from the first on, later chunks attend to.
    """

    start: int
    frames: int
    kept: int


class StreamCachePool:
    """One ring and one convolution history per live stream, allocated once.

    The last slot is scratch: padding rows of a batch write to it.
    """

    def __init__(
        self,
        config: CachedConfig,
        like: Tensor,
        steps: int,
        slots: int,
        frames: int,
        rows: int = 2,
        kv_cache_dtype: KvCacheDtype = "auto",
    ):
        """Make the pool. like: a tensor of its device and dtype. frames: of a ring. rows: of a stream in a batch."""
        reach = config.conv_kernel - 1
        self.rows = rows
        self.int8 = kv_cache_dtype == "int8"
        row, dtype = (config.head_dim + SCALE_BYTES, torch.int8) if self.int8 else (config.head_dim, like.dtype)
        self.keys = like.new_zeros(slots + 1, steps, config.depth, rows, config.heads, frames, row, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        # (.., convolution, guidance row, frame, C)
        self.history = like.new_zeros(slots + 1, steps, config.conv_pairs, 2, rows, reach, config.width)
        self.frames = frames
        self.slots = slots
        self.mask_chunk = config.chunk_frames
        self._free = list(range(slots))

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.history.nbytes

    def prompt_bytes(self, frames: int) -> int:
        """Return the bytes of the `PromptCache` of a voice of that many frames."""
        keys, history = self.keys[0], self.history[0]
        return 2 * keys.nbytes // self.frames * frames + history.nbytes

    def stored(self, x: Tensor) -> Tensor:
        """Return keys or values (.., D) as they are kept."""
        return quantized(x) if self.int8 else x

    def loaded(self, rows: Tensor) -> Tensor:
        """Return keys or values (.., D), given how they are kept."""
        return dequantized(rows, self.history.dtype) if self.int8 else rows

    def empty_attention(self, frames: int) -> KeyValues:
        """Allocate the keys and values of a prompt."""
        *shape, _, D = self.keys.shape[1:]
        return KeyValues(*(self.keys.new_empty(*shape, frames, D) for _ in range(2)))

    def empty_prompt(self) -> Prefilled:
        """Return what `Solve.prefill` would leave of a prompt without frames."""
        return Prefilled(self.empty_attention(0), torch.zeros_like(self.history[0]))

    def acquire(self, prompt: PromptCache) -> StreamCache:
        """Take a slot for a stream that begins after its prompt. UnavailableError when all are taken."""
        if not self._free:
            raise UnavailableError(f"all {self.slots} streams of the flow are taken")
        self.history[self._free[-1]] = prompt.history
        return StreamCache(self._free.pop())

    def release(self, stream_cache: StreamCache) -> None:
        self._free.append(stream_cache.slot)

    def replace(self, stream_cache: StreamCache, other: "StreamCachePool", theirs: StreamCache) -> None:
        """Copy what a stream of another pool, with rings of the same length and not in 8 bits, keeps over what this one
        does."""
        for ours, source in ((self.keys, other.keys), (self.values, other.values)):
            ours[stream_cache.slot] = self.stored(source[theirs.slot])
        self.history[stream_cache.slot] = other.history[theirs.slot]
        stream_cache.frames, stream_cache.next, stream_cache.total = theirs.frames, theirs.next, theirs.total

    def history_of(self, slots: Tensor) -> Tensor:
        """Read the convolution histories of B streams, slots (B,) -> (steps, pair, convolution, R, frame, C)."""
        history = self.history[slots]  # (B, steps, pair, convolution, guidance row, frame, C)
        # Of one guidance row, flattening copies nothing, and the kernels take contiguous rows.
        return history.permute(1, 2, 3, 4, 0, 5, 6).flatten(3, 4).contiguous()

    def keep_history(self, slots: Tensor, history: Tensor) -> None:
        """Store convolution histories, shaped as `history_of` returns them."""
        self.history.index_copy_(0, slots, history.unflatten(3, (self.rows, -1)).permute(4, 0, 1, 2, 3, 5, 6))

    def row(self, stream: CachedStream, rendered: int) -> Row:
        """Return the row of a stream's chunk, given how many of its tokens are rendered then. Where the mask has
        chunks, only whole ones are kept: later frames of the same one change a frame."""
        start = stream.prompt.frames + stream.cache.total
        end = TOKEN_MEL_RATIO * (len(stream.prompt.voice.tokens) + rendered)
        return Row(start, end - start, self.whole(end) - start)

    def whole(self, frames: int) -> int:
        """Return how many of so many frames, from the prompt's first on, are in whole chunks of the attention mask."""
        return frames - frames % self.mask_chunk if self.mask_chunk else frames

    def append(self, stream_cache: StreamCache, row: Row, index: int, step: int, keys: Tensor, values: Tensor) -> None:
        """Copy what row `index` of one step of a solve keeps, of (depth, R, H, T, D), into its stream's ring."""
        B = keys.shape[1] // self.rows  # the rows of a stream are B apart
        count = min(row.kept, self.frames)
        first = min(count, self.frames - stream_cache.next)  # up to the ring's end; the rest goes to its start
        for ring, new in ((self.keys, keys), (self.values, values)):
            slot = ring[stream_cache.slot, step]
            new = self.stored(new[:, index::B, :, row.kept - count : row.kept])
            slot[..., stream_cache.next : stream_cache.next + first, :] = new[..., :first, :]
            slot[..., : count - first, :] = new[..., first:, :]

    def advance(self, stream_cache: StreamCache, row: Row) -> None:
        """Count the frames that were copied into the ring."""
        count = min(row.kept, self.frames)
        stream_cache.next = (stream_cache.next + count) % self.frames
        stream_cache.frames = min(stream_cache.frames + count, self.frames)
        stream_cache.total += row.kept
