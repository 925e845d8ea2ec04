"""Keys and values of an estimator: a prompt cache per voice, shared by its streams, and a bounded one per stream.

The cache of a stream is a ring: new frames overwrite the oldest ones in place, so their order there is not that of
time. Positions, if the estimator has any, are in the keys.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from cosyvoice_triton.config import KvCacheDtype
from cosyvoice_triton.constants import TOKEN_MEL_RATIO
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.networks.flow.cache import KeyValues
from cosyvoice_triton.networks.flow.config import DiTConfig, RotaryDiTConfig
from cosyvoice_triton.token2wav.gpu.quantization import SCALE_BYTES, dequantized, quantized
from cosyvoice_triton.token2wav.stream import Chunk, Stream
from cosyvoice_triton.voice.prompt import Prompt


class Prefilled(NamedTuple):
    """The keys, values and history that the estimator leaves of a prompt."""

    attention: KeyValues  # (steps, depth, 2, H, P, D): keys and values of the prompt
    history: Tensor  # (steps, pair, convolution, guidance row, frame, C): the convolutions' at the prompt's end


@dataclass(frozen=True)
class PromptCache:
    """The estimator's memory of a voice's prompt: shared by all streams of the voice, never changed.

    P: frames whose keys and values are final, of 2 for each token. The others are computed with a stream's first ones.
    """

    voice: Prompt
    attention: KeyValues  # (steps, depth, 2, H, P, D): keys and values of the prompt
    history: Tensor  # (steps, pair, convolution, guidance row, frame, C): the convolutions' at the prompt's end
    rest: Tensor  # (n, mel): the mel of the prompt's other frames
    speaker: Tensor  # (1, mel): projected x-vector

    @cached_property
    def frames(self) -> int:
        return self.attention.frames

    @property
    def nbytes(self) -> int:
        return self.attention.nbytes + self.history.nbytes


@dataclass
class _Entry:
    cache: PromptCache
    streams: int = 0


class PromptCaches:
    """The prompt caches of voices, bounded in bytes. Those without a stream are evicted, least recently used first."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.nbytes = 0
        self.evicted = 0  # since the start
        self._used = 0  # bytes of those with streams

    def fitting(self, wanted: Sequence[tuple[bytes, int]]) -> list[bool]:
        """Return for which of these streams there is room, together, given the key and the size of each one's cache.

        They come in order: after a voice that has to wait, no other one takes the room that it waits for. One that
        could wait for ever counts as fitting: `acquire` refuses it.
        """
        room = self.max_bytes - self._used
        fits: list[bool] = []
        added: set[bytes] = set()
        for key, nbytes in wanted:
            entry = self._entries.get(key)
            taken = 0 if key in added or (entry and entry.streams) or nbytes > self.max_bytes else nbytes
            fits.append(taken <= room)
            room = room - taken if fits[-1] else 0
            added |= {key} if fits[-1] else set()
        return fits

    def acquire(self, key: bytes, nbytes: int, prefill: Callable[[], PromptCache]) -> PromptCache:
        """Return the cache for one more stream, made by `prefill` if it is not there; UnavailableError if it does not
        fit."""
        if key not in self._entries:
            if not self.make_room(nbytes):
                raise UnavailableError(
                    f"no room for another voice: its prompt cache takes {nbytes / 2**20:.1f} MiB, and the {len(self)} "
                    f"voices with live streams take {self.nbytes / 2**20:.1f} of {self.max_bytes / 2**20:.1f} MiB"
                )
            self.add(key, prefill())
        entry = self._entries[key]
        self._entries.move_to_end(key)
        self._used += 0 if entry.streams else entry.cache.nbytes
        entry.streams += 1
        return entry.cache

    def add(self, key: bytes, cache: PromptCache) -> None:
        """Keep a cache that was made before the streams that will acquire it."""
        self._entries[key] = _Entry(cache)
        self.nbytes += cache.nbytes

    def replace(self, key: bytes, bad: PromptCache, good: PromptCache) -> PromptCache:
        """Evict `bad` for new streams, unless that was done before; return the cache that they get."""
        entry = self._entries[key]
        if entry.cache is bad:
            entry.cache = good
            self.evicted += 1
        return entry.cache

    def release(self, key: bytes) -> None:
        """Count one stream of the cache less."""
        entry = self._entries[key]
        entry.streams -= 1
        self._used -= 0 if entry.streams else entry.cache.nbytes

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def evict_idle(self, most: int = 0) -> None:
        """Evict caches without a stream, least recently used first, until all take `most` bytes or none is left."""
        idle = [key for key, entry in self._entries.items() if entry.streams == 0]
        while idle and self.nbytes > most:
            self.nbytes -= self._entries.pop(idle.pop(0)).cache.nbytes
            self.evicted += 1

    def make_room(self, nbytes: int) -> bool:
        """Evict idle voices until that many bytes fit; False if they do not when none is left."""
        self.evict_idle(self.max_bytes - nbytes)
        return self.nbytes + nbytes <= self.max_bytes


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
