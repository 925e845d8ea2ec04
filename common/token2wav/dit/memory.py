"""Keys and values of the DiT: a prompt cache per voice, shared by its streams, and a bounded tail per stream.

Attention uses no positions, so a tail is a ring: new frames overwrite the oldest ones in place.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.constants import TOKEN_MEL_RATIO
from common.errors import UnavailableError
from common.flow.cache import CONV_HISTORY, EstimatorCache, KeyValues
from common.flow.config import DiTConfig
from common.flow.dit import DiTFlow
from common.token2wav.dit.solver import DiTSolver
from common.token2wav.noise import NoiseTape
from common.token2wav.stream import Chunk, Stream
from common.voice.prompt import Prompt


class Prefilled(NamedTuple):
    """What running the estimator over a prompt leaves."""

    attention: KeyValues  # (steps, depth, 2, H, 2P, D): keys and values of the prompt
    history: Tensor  # (steps, depth, convolution, guidance row, frame, C): the convolutions' at the prompt's end


@dataclass(frozen=True)
class PromptCache:
    """What prefill leaves of a voice's prompt: shared by all streams of the voice, never changed."""

    voice: Prompt
    attention: KeyValues  # (steps, depth, 2, H, 2P, D): keys and values of the prompt
    history: Tensor  # (steps, depth, convolution, guidance row, frame, C): the convolutions' at the prompt's end
    speaker: Tensor  # (1, mel): projected x-vector

    @property
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
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.nbytes = 0
        self.evicted = 0  # since the start
        self._used = 0  # bytes of those with streams

    def fitting(self, wanted: Sequence[tuple[bytes, int]]) -> list[bool]:
        """Which of these streams there is room for, together, given the key and the size of each one's cache.

        They come in order: after a voice that has to wait, no other one takes the room that it waits for. One that
        could wait for ever counts as fitting: `acquire` refuses it.
        """
        room = self._max_bytes - self._used
        fits: list[bool] = []
        added: set[bytes] = set()
        for key, nbytes in wanted:
            entry = self._entries.get(key)
            taken = 0 if key in added or (entry and entry.streams) or nbytes > self._max_bytes else nbytes
            fits.append(taken <= room)
            room = room - taken if fits[-1] else 0
            added |= {key} if fits[-1] else set()
        return fits

    def acquire(self, key: bytes, nbytes: int, prefill: Callable[[], PromptCache]) -> PromptCache:
        """The cache for one more stream, made by `prefill` if it is not there; UnavailableError if it does not fit."""
        if key not in self._entries:
            if not self.make_room(nbytes):
                raise UnavailableError(
                    f"no room for another voice: its prompt cache takes {nbytes / 2**20:.1f} MiB, and the {len(self)} "
                    f"voices with live streams take {self.nbytes / 2**20:.1f} of {self._max_bytes / 2**20:.1f} MiB"
                )
            self._put(key, prefill())
        entry = self._entries[key]
        self._entries.move_to_end(key)
        self._used += 0 if entry.streams else entry.cache.nbytes
        entry.streams += 1
        return entry.cache

    def add(self, key: bytes, cache: PromptCache) -> None:
        """Keep a cache that was made before the streams that will acquire it."""
        self._put(key, cache)

    def replace(self, key: bytes, bad: PromptCache, good: PromptCache) -> PromptCache:
        """Evict `bad` for new streams, unless that was done before; returns the cache that they get."""
        entry = self._entries[key]
        if entry.cache is bad:
            entry.cache = good
            self.evicted += 1
        return entry.cache

    def release(self, key: bytes) -> None:
        """One of its streams has ended."""
        entry = self._entries[key]
        entry.streams -= 1
        self._used -= 0 if entry.streams else entry.cache.nbytes

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def _put(self, key: bytes, cache: PromptCache) -> None:
        self._entries[key] = _Entry(cache)
        self.nbytes += cache.nbytes

    def evict_idle(self, most: int = 0) -> None:
        """Evict caches without a stream, least recently used first, until all take `most` bytes or none is left."""
        idle = [key for key, entry in self._entries.items() if entry.streams == 0]
        while idle and self.nbytes > most:
            self.nbytes -= self._entries.pop(idle.pop(0)).cache.nbytes
            self.evicted += 1

    def make_room(self, nbytes: int) -> bool:
        """Evict idle voices until that many bytes fit; False if they do not when none is left."""
        self.evict_idle(self._max_bytes - nbytes)
        return self.nbytes + nbytes <= self._max_bytes


@dataclass
class Tail:
    """The recent frames of one stream: a slot of the pool, and how much of its ring is written."""

    slot: int
    frames: int = 0  # written, at most the ring's length
    next: int = 0  # where the next frame goes
    total: int = 0  # frames written since the stream began


@dataclass(kw_only=True)
class DiTStream(Stream):
    """A stream of the DiT flow."""

    prompt: PromptCache
    prompt_key: bytes
    tail: Tail
    context: np.ndarray  # (n,) its recent tokens, look-ahead excluded, as far as the encoder's window holds them
    chunk_ends: list[int]  # how many tokens were rendered after each of its chunks

    @property
    def complete(self) -> bool:
        """Whether the tail still holds every frame."""
        return self.tail.frames == TOKEN_MEL_RATIO * self.rendered


DiTChunk = Chunk[DiTStream]


def first_frame(chunk: DiTChunk) -> int:
    """Absolute index of the chunk's first mel frame, the prompt's included: where its noise begins."""
    return chunk.stream.prompt.frames + TOKEN_MEL_RATIO * chunk.offset


class TailPool:
    """One ring and one convolution history per live stream, allocated once.

    The last slot is scratch: padding rows of a batch write to it.
    """

    def __init__(self, config: DiTConfig, like: Tensor, steps: int, slots: int, frames: int):
        """`like`: a tensor of the pool's device and dtype."""
        self.keys = like.new_zeros(slots + 1, steps, config.depth, 2, config.heads, frames, config.head_dim)
        self.values = torch.zeros_like(self.keys)
        # (.., convolution, guidance row, frame, C)
        self.history = like.new_zeros(slots + 1, steps, config.depth, 2, 2, CONV_HISTORY, config.width)
        self.frames = frames
        self.slots = slots
        self._free = list(range(slots))

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.history.nbytes

    def prompt_bytes(self, frames: int) -> int:
        """Size of a `PromptCache` of that many frames."""
        keys, history = self.keys[0], self.history[0]
        return 2 * keys.nbytes // self.frames * frames + history.nbytes

    def empty_attention(self, frames: int) -> KeyValues:
        """Memory for the keys and values of a prompt."""
        *shape, _, D = self.keys.shape[1:]
        return KeyValues(*(self.keys.new_empty(*shape, frames, D) for _ in range(2)))

    def empty_prompt(self) -> Prefilled:
        """What `Solve.prefill` would leave of a prompt without frames."""
        return Prefilled(self.empty_attention(0), torch.zeros_like(self.history[0]))

    def acquire(self, prompt: PromptCache) -> Tail:
        """A slot for a stream that begins after its prompt. UnavailableError when all are taken."""
        if not self._free:
            raise UnavailableError(f"all {self.slots} streams of the flow are taken")
        self.history[self._free[-1]] = prompt.history
        return Tail(self._free.pop())

    def release(self, tail: Tail) -> None:
        self._free.append(tail.slot)

    def replace(self, tail: Tail, other: "TailPool", theirs: Tail) -> None:
        """Copy what a stream of another pool, with rings of the same length, keeps over what this one does."""
        for ours, source in ((self.keys, other.keys), (self.values, other.values), (self.history, other.history)):
            ours[tail.slot] = source[theirs.slot]
        tail.frames, tail.next, tail.total = theirs.frames, theirs.next, theirs.total

    def history_of(self, slots: Tensor) -> Tensor:
        """Convolution histories of B streams, slots (B,) -> (steps, depth, convolution, R, frame, C)."""
        history = self.history[slots]  # (B, steps, depth, convolution, guidance row, frame, C)
        return history.permute(1, 2, 3, 4, 0, 5, 6).flatten(3, 4)

    def keep_history(self, slots: Tensor, history: Tensor) -> None:
        """Store them, shaped as `history_of` returns them."""
        self.history.index_copy_(0, slots, history.unflatten(3, (2, -1)).permute(4, 0, 1, 2, 3, 5, 6))

    def append(self, chunk: DiTChunk, index: int, step: int, keys: Tensor, values: Tensor) -> None:
        """Copy the frames of row `index` of one step of a solve, (depth, 2 B, H, T, D), into its stream's ring."""
        B = keys.shape[1] // 2  # the two guidance rows of a stream are B apart
        count, tail = min(chunk.frames, self.frames), chunk.stream.tail
        first = min(count, self.frames - tail.next)  # up to the ring's end; the rest goes to its start
        for ring, new in ((self.keys, keys), (self.values, values)):
            slot, new = ring[tail.slot, step], new[:, index::B, :, chunk.frames - count : chunk.frames]
            slot[..., tail.next : tail.next + first, :] = new[..., :first, :]
            slot[..., : count - first, :] = new[..., first:, :]

    def advance(self, chunk: DiTChunk) -> None:
        """Count the frames that were copied into the ring."""
        count, tail = min(chunk.frames, self.frames), chunk.stream.tail
        tail.next = (tail.next + count) % self.frames
        tail.frames = min(tail.frames + count, self.frames)
        tail.total += chunk.frames


class Solve(Protocol):
    """A way to run the Euler solve of a batch whose streams keep their keys and values apart."""

    def prefill(self, mu: Tensor, speaker: Tensor, mel: Tensor, frames: Sequence[int]) -> list[Prefilled]:
        """Of each prompt.

        mu (B, T, mel): encoder output, speaker (B, mel): projected x-vectors, mel (B, T, mel): the prompts' own.
        frames (B): length of each; the rest of a row is padding.
        """
        ...

    def run(self, chunks: list[DiTChunk], mu: Tensor) -> Tensor:
        """Encoder output mu (B, T, mel) -> mel (B, T, mel), valid until the next call. Updates the streams' rings and
        convolution histories."""
        ...


class GatheredSolve:
    """The solve on any device: the context of a batch is gathered into one padded tensor."""

    def __init__(self, solver: DiTSolver, pool: TailPool, noise: NoiseTape):
        self._solver = solver
        self._pool = pool
        self._noise = noise

    def prefill(self, mu: Tensor, speaker: Tensor, mel: Tensor, frames: Sequence[int]) -> list[Prefilled]:
        (B, T, _), solver = mu.shape, self._solver
        scratch = solver.scratch(solver.no_history(2 * B), T)
        starts, lengths = torch.zeros(B, dtype=torch.int64, device=mu.device), torch.tensor(frames, device=mu.device)
        prompts = [self._pool.empty_attention(count) for count in frames]
        context = NoContext(lengths, T, prompts)
        solver.solve(self._noise.gather(starts, T), solver.conditions(mu, speaker, mel), lengths, context, scratch)
        return prefilled(prompts, scratch.next_history)

    def run(self, chunks: list[DiTChunk], mu: Tensor) -> Tensor:
        T, device = mu.shape[1], mu.device
        frames = torch.tensor([chunk.frames for chunk in chunks], device=device)
        starts = torch.tensor([first_frame(chunk) for chunk in chunks], device=device)
        slots = torch.tensor([chunk.stream.tail.slot for chunk in chunks], device=device)
        conditions = self._solver.conditions(mu, torch.cat([chunk.stream.prompt.speaker for chunk in chunks]))
        scratch = self._solver.scratch(self._pool.history_of(slots), T)
        context = GatheredContext(self._pool, chunks, T)
        mel = self._solver.solve(self._noise.gather(starts, T), conditions, frames, context, scratch)
        self._pool.keep_history(slots, scratch.next_history)
        for chunk in chunks:
            self._pool.advance(chunk)
        return mel


def prefilled(prompts: Sequence[KeyValues], history: Tensor) -> list[Prefilled]:
    """What a prefill of B prompts, or more rows of which the first B count, leaves of each: its keys and values, and
    its part of the convolutions' history (steps, depth, convolution, R, frame, C), copied."""
    B = history.shape[3] // 2
    return [
        Prefilled(attention, history[:, :, :, [index, B + index]])  # the two guidance rows
        for index, attention in enumerate(prompts)
    ]


class NoContext:
    """For prefill: prompts attend to themselves only, and are kept in `prompts`.

    frames (B,): their lengths in rows of `longest` frames.
    """

    def __init__(self, frames: Tensor, longest: int, prompts: Sequence[KeyValues]):
        visible = torch.arange(longest, device=frames.device) < frames.repeat(2)[:, None]  # (R, T)
        self._mask = None if visible.all() else visible[:, None, None]  # (R, 1, 1, T)
        self._prompts = prompts

    def attend(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask)
        return attended.transpose(1, 2).flatten(2)  # (R, H, T, D) -> (R, T, H * D)

    def keep(self, step: int, keys: Tensor, values: Tensor) -> None:
        B = keys.shape[1] // 2
        for index, prompt in enumerate(self._prompts):
            prompt.keys[step] = keys[:, index::B, :, : prompt.frames]
            prompt.values[step] = values[:, index::B, :, : prompt.frames]


class GatheredContext:
    """Context copied into one padded tensor per solve: for CPUs, and the reference of the fused kernel's tests."""

    def __init__(self, pool: TailPool, chunks: list[DiTChunk], frames: int):
        B = len(chunks)
        self._pool, self._chunks = pool, chunks
        lengths = [chunk.stream.prompt.frames + chunk.stream.tail.frames for chunk in chunks]
        steps, depth, _, H, _, D = chunks[0].stream.prompt.attention.keys.shape
        shape = (steps, depth, 2 * B, H, max(lengths), D)
        self._keys = pool.keys.new_zeros(shape)
        self._values = pool.keys.new_zeros(shape)
        visible = torch.zeros(2 * B, max(lengths) + frames, dtype=torch.bool, device=pool.keys.device)
        for index, chunk in enumerate(chunks):
            both = [index, B + index]
            prompt, tail = chunk.stream.prompt, chunk.stream.tail
            P, length = prompt.frames, lengths[index]
            for out, of_prompt, of_tail in (
                (self._keys, prompt.attention.keys, pool.keys),
                (self._values, prompt.attention.values, pool.values),
            ):
                out[:, :, both, :, :P] = of_prompt
                out[:, :, both, :, P:length] = of_tail[tail.slot, ..., : tail.frames, :]
            visible[both, :length] = True
            visible[both, max(lengths) : max(lengths) + chunk.frames] = True
        self._mask = None if visible.all() else visible[:, None, None]  # (R, 1, 1, K)

    def attend(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = torch.cat([self._keys[step, layer], k], dim=2)
        values = torch.cat([self._values[step, layer], v], dim=2)
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=self._mask)
        return attended.transpose(1, 2).flatten(2)  # (R, H, T, D) -> (R, T, H * D)

    def keep(self, step: int, keys: Tensor, values: Tensor) -> None:
        for index, chunk in enumerate(self._chunks):
            self._pool.append(chunk, index, step, keys, values)


class ChunkwiseSolve:
    """The solve with an estimator that another runtime computes: rows of equal sizes share a batch."""

    def __init__(self, network: DiTFlow, pool: TailPool, noise: NoiseTape):
        self._decoder = network.decoder
        self._pool = pool
        self._noise = noise

    def prefill(self, mu: Tensor, speaker: Tensor, mel: Tensor, frames: Sequence[int]) -> list[Prefilled]:
        left = []
        for index, count in enumerate(frames):  # of different lengths, which the estimator cannot take in one batch
            row = slice(index, index + 1)
            caches = self._decoder.estimator.empty_cache(self._pool.keys.shape[1], rows=2).with_room(count)
            starts = torch.zeros(1, dtype=torch.int64, device=mu.device)
            self._advance(caches, starts, mu[row, :count], speaker[row], mel[row, :count])
            history = caches.conv.transpose(-1, -2).contiguous()  # (.., C, frame) -> (.., frame, C)
            left.append(Prefilled(caches.attention, history))
        return left

    def run(self, chunks: list[DiTChunk], mu: Tensor) -> Tensor:
        mel = torch.zeros(mu.shape, device=mu.device)
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, chunk in enumerate(chunks):
            groups[chunk.stream.prompt.frames + chunk.stream.tail.frames, chunk.frames].append(index)
        for (_, frames), members in groups.items():
            mel[members, :frames] = self._solve([chunks[index] for index in members], mu[members, :frames])
        return mel

    def _solve(self, chunks: list[DiTChunk], mu: Tensor) -> Tensor:
        """(B, T, mel) -> (B, T, mel)"""
        T, pool = mu.shape[1], self._pool
        slots = torch.tensor([chunk.stream.tail.slot for chunk in chunks], device=mu.device)
        starts = torch.tensor([first_frame(chunk) for chunk in chunks], device=mu.device)
        history = pool.history_of(slots).transpose(-1, -2)  # (.., R, frame, C) -> (.., R, C, frame)
        caches = EstimatorCache(self._context(chunks), history).with_room(T)
        speaker = torch.cat([chunk.stream.prompt.speaker for chunk in chunks])
        mel = self._advance(caches, starts, mu, speaker, torch.zeros_like(mu))
        pool.keep_history(slots, caches.conv.transpose(-1, -2))
        keys, values = (x[..., -T:, :] for x in (caches.attention.keys, caches.attention.values))
        for index, chunk in enumerate(chunks):
            for step in range(len(keys)):
                pool.append(chunk, index, step, keys[step], values[step])
            pool.advance(chunk)
        return mel

    def _advance(self, caches: EstimatorCache, starts: Tensor, mu: Tensor, speaker: Tensor, known: Tensor) -> Tensor:
        """mu and the known mel (B, T, mel) -> mel (B, T, mel); fills the last T frames of the caches."""
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

    def _context(self, chunks: list[DiTChunk]) -> KeyValues:
        """Keys and values of the prompts and tails, gathered: (steps, depth, 2 B, H, K, D)."""
        prompts, pool = [chunk.stream.prompt.attention for chunk in chunks], self._pool
        return KeyValues(
            _gathered(chunks, [prompt.keys for prompt in prompts], pool.keys),
            _gathered(chunks, [prompt.values for prompt in prompts], pool.values),
        )


def _gathered(chunks: list[DiTChunk], prompts: list[Tensor], rings: Tensor) -> Tensor:
    """(steps, depth, 2, H, K, D) of each stream -> (steps, depth, 2 B, H, K, D), the conditional rows first"""
    contexts = [
        torch.cat([prompt, rings[chunk.stream.tail.slot, ..., : chunk.stream.tail.frames, :]], dim=-2)
        for chunk, prompt in zip(chunks, prompts, strict=True)
    ]
    return torch.stack(contexts, dim=3).flatten(2, 3)
