"""Everything that bounds a batch or the size of a CUDA graph, computed in one place.

A CUDA graph has fixed sizes: batches are padded to a batch size and their rows to a length class. The classes cover
every chunk that the configured hops can make, so that none of them falls back to eager kernels, and no graph is larger
than what `max_streams` can fill. What they take of the memory is estimated in `memory`.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from operator import mul

from cosyvoice_triton.config import Token2WavConfig
from cosyvoice_triton.constants import (
    CONTEXT_TOKENS,
    LOOKAHEAD_TOKENS,
    MAX_PROMPT_TOKENS,
    ONSET_TOKENS,
    TOKEN_MEL_RATIO,
)
from cosyvoice_triton.profiles import H200, Profile
from cosyvoice_triton.token2wav.policy.scheduler import FIRST_CHUNK_WORKER

Size = tuple[int, ...]  # batch size and length, or a length alone

WORKERS = 2  # batches that are rendered at the same time on a GPU, see `FIRST_CHUNK_WORKER`
BATCHES = (1, 2, 4, 8, 16, 24, 32, 64)
FRAMES = (32, 64, 104, 128)  # length classes of chunks below the largest one, mel frames
PROMPT_FRAMES = (128, 256, 384, 512, 768, 1024)  # length classes of prompts, mel frames
WINDOW_TOKENS = (160, 208, 256, 320, 416, 512, 768, 1024)  # length classes of encoder windows
WINDOW_FRAMES = (320, 416, 512, 640, 832, 1024, 1536)  # length classes of the same windows in the estimator
STEP = 8  # the largest class of each kind is a multiple of it

# Most of a whole batch, padding included: larger ones gain no speed, and their temporary tensors take 0.5 to 1 GB.
DIT_FRAMES = 6656
ENCODER_TOKENS = 13_312
UNET_FRAMES = 13_312
COSYVOICE3_FRAMES = 4096  # of twice the width of the others; not tuned on a GPU
HIFT_FRAMES = 4096
PREFILL_FRAMES = 2048  # one prompt of the longest, or several shorter ones


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """The limits of a token2wav model, and the batch and graph sizes that follow from them.

    max_streams: live streams. first_hop_tokens, max_hop_tokens: hops of the orchestrator's schedule. chunk_boundary:
    chunks end on its multiples (`Stack.chunk_boundary`). workers: how many there are with CUDA graphs.
    worker: the one that is limited; FIRST_CHUNK_WORKER has small batches. profile: the numbers of scheduling, of which
    some are limits. ValueError if a chunk of the largest hop
    alone is beyond the limits.
    """

    max_streams: int = Token2WavConfig.max_streams
    first_hop_tokens: int = Token2WavConfig.first_hop_tokens
    max_hop_tokens: int = Token2WavConfig.max_hop_tokens
    chunk_boundary: int = 1
    workers: int = WORKERS
    worker: int = 0
    profile: Profile = H200
    prefill_frames = PREFILL_FRAMES

    def __post_init__(self) -> None:
        largest = self.chunk_frames[-1]
        if largest > HIFT_FRAMES:
            hop = "max_hop_tokens" if self.max_hop_tokens >= self._longest_first_hop else "first_hop_tokens"
            raise ValueError(
                f"{hop} {getattr(self, hop)} makes chunks of {largest} mel frames; a batch holds {HIFT_FRAMES}"
            )

    @property
    def first_chunk_tokens(self) -> int:
        """Count the new tokens of the longest chunk that the first hop makes, also if it is the final one."""
        return self._longest_first_hop + LOOKAHEAD_TOKENS - 1

    def of_worker(self, worker: int) -> "BatchLimits":
        return replace(self, worker=worker)

    @property
    def of_each_worker(self) -> list["BatchLimits"]:
        return [self.of_worker(worker) for worker in range(self.workers)]

    @property
    def starts(self) -> bool:
        """Return whether only first chunks and prompts are rendered."""
        return self.worker == FIRST_CHUNK_WORKER

    @property
    def of_prompts(self) -> bool:
        """Return whether prompts are computed by these graphs."""
        return self.starts or self.workers == 1

    @property
    def max_chunks(self) -> int:
        """Return how many chunks one batch may have."""
        numbers = self.profile
        most = numbers.scheduler.first_chunk_batch if self.starts else numbers.limits.max_batch
        return min(most, self.max_streams)

    @cached_property
    def chunk_frames(self) -> tuple[int, ...]:
        """Return the length classes of chunks, mel frames. A final chunk may be LOOKAHEAD_TOKENS - 1 longer."""
        return _classes(FRAMES, TOKEN_MEL_RATIO * (self._longest_hop + LOOKAHEAD_TOKENS - 1))

    @cached_property
    def row_frames(self) -> tuple[int, ...]:
        """Return length classes, mel frames, of what a flow that keeps keys and values computes for a chunk: also the
        tokens before it that are not kept, see `kv_cache.Row`. After a prompt these are up to a boundary and the
        look-ahead."""
        before = self.chunk_boundary - 1 + LOOKAHEAD_TOKENS if self.chunk_boundary > 1 else 0
        longest = TOKEN_MEL_RATIO * (self._longest_hop + LOOKAHEAD_TOKENS - 1 + before)
        return _classes((*FRAMES, *(c for c in self.chunk_frames if c > FRAMES[-1])), longest)

    @cached_property
    def window_tokens(self) -> tuple[int, ...]:
        """Return the length classes of encoder windows: the longest prompt, the whole context and the largest chunk."""
        return _classes(WINDOW_TOKENS, self._longest_window)

    @cached_property
    def window_frames(self) -> tuple[int, ...]:
        """Return the length classes of windows in mel frames, for the estimators that compute them."""
        return _classes(WINDOW_FRAMES, TOKEN_MEL_RATIO * self._longest_window)

    @cached_property
    def prompt_frames(self) -> tuple[int, ...]:
        """Return the length classes of prompts, mel frames."""
        return _classes(PROMPT_FRAMES, TOKEN_MEL_RATIO * MAX_PROMPT_TOKENS)

    @property
    def _longest_first_hop(self) -> int:
        """Return `first_hop_tokens` and the silent ones before, extended to the next boundary: it may be more than
        `max_hop_tokens`."""
        return self.first_hop_tokens + ONSET_TOKENS + self.chunk_boundary - 1

    @property
    def _longest_hop(self) -> int:
        return self._longest_first_hop if self.starts else max(self.max_hop_tokens, self._longest_first_hop)

    @property
    def _longest_window(self) -> int:
        return MAX_PROMPT_TOKENS + (0 if self.starts else CONTEXT_TOKENS) + self._longest_hop + LOOKAHEAD_TOKENS - 1

    def sizes(self, lengths: tuple[int, ...], most: int) -> list[Size]:
        """Return batch sizes and lengths of graphs: batches that `max_streams` can fill, of at most `most` in all, or
        an eighth of that for starts, but of any length alone."""
        batches = [*(B for B in BATCHES if B < self.max_chunks), self.max_chunks]
        most = max(most // 8, lengths[-1]) if self.starts else most
        return [(B, T) for B, T in product(batches, lengths) if B * T <= most]


def smallest(sizes: Collection[Size], *needed: int) -> Size | None:
    """Return the smallest of the sizes that holds `needed` in every dimension; None if there is none."""
    holding = [size for size in sizes if all(have >= need for have, need in zip(size, needed, strict=True))]
    return min(holding, key=math.prod, default=None)


def batch_parts(sizes: Collection[Size], rows: int, length: int) -> list[tuple[slice, Size | None]]:
    """Say how a batch of rows of that length is computed by CUDA graphs of these sizes: rows of it, each with the size
    of the graph that computes them. A batch that no graph holds is halved; a row that none holds has no size."""

    def halved(begin: int, end: int) -> list[tuple[slice, Size | None]]:
        size = smallest(sizes, end - begin, length)
        if size is None and end - begin > 1:
            middle = end - (end - begin) // 2
            return halved(begin, middle) + halved(middle, end)
        return [(slice(begin, end), size)]

    return halved(0, rows)


def padding(sizes: Collection[Size]) -> Callable[[int, int], int]:
    """Return a function that counts the tokens that are computed for a number of chunks, padding included, given the
    tokens of the longest one.

    sizes: batch sizes and mel frames of the CUDA graphs; none if there are no graphs.
    """

    if not sizes:
        return mul

    @cache
    def padded(chunks: int, tokens: int) -> int:
        frames = TOKEN_MEL_RATIO * tokens
        return sum(math.prod(size or (1, frames)) for _, size in batch_parts(sizes, chunks, frames)) // TOKEN_MEL_RATIO

    return padded


def _classes(below: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return `below` as far as it is under `most`, and the next multiple of STEP that holds it."""
    largest = math.ceil(most / STEP) * STEP
    return (*(c for c in below if c < largest), largest)
