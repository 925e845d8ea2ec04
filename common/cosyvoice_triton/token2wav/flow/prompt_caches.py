"""Prompt caches: the keys and values of a voice's prompt, computed once and shared by its streams."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.networks.flow.cache import KeyValues
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
        self.evict_idle(self.max_bytes - nbytes)
        return self.nbytes + nbytes <= self.max_bytes
