"""Which streams are opened next, and which chunks are rendered in one batch. Pure policy: no streams, no tensors, no
clock."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

from cosyvoice_triton.profiles import H200, SchedulerNumbers

# A worker renders one batch after the other. If there are two, the second one renders first chunks and prompts, and the
# first one everything else: see `worker_takes`.
CHUNK_WORKER, FIRST_CHUNK_WORKER = 0, 1


class Opening(NamedTuple):
    """A stream that waits to be opened.

    voice: its digest. frames: mel frames to prefill, 0 if the voice's prompt cache is there. audio_left: as in
    `Candidate`; a later segment's listener may still play the one before. arrived: likewise.
    """

    voice: bytes
    frames: int
    audio_left: float | None
    arrived: int


class Candidate(NamedTuple):
    """A request that can be rendered now.

    audio_left: seconds until its listener runs out of audio, negative after that; None before the first audio.
    arrived: its number in the order of arrival.
    tokens: how many are computed for it; None for a whole utterance, which is rendered alone.
    first: whether it is a first chunk that FIRST_CHUNK_WORKER renders.
    waited: seconds in the queue.
    """

    audio_left: float | None
    arrived: int
    tokens: int | None
    first: bool = False
    waited: float = 0.0


class ChunkScheduler:
    """The decisions with the numbers of a profile."""

    def __init__(self, numbers: SchedulerNumbers = H200.scheduler) -> None:
        self._numbers = numbers

    def patience(self, waited: float) -> float:
        """Return how much audio a listener has left who is as urgent as a whole utterance that has waited so long."""
        return max(self._numbers.nearly_dry_seconds, self._numbers.whole_seconds - waited)

    def opens(
        self, waiting: Sequence[Opening], audio_left: Sequence[float | None], max_frames: int, free: int
    ) -> list[int]:
        """Return the indices of the streams to open before the next batch of chunks, at most `free`.

        audio_left: of the listeners whose chunks wait. A stream whose prompt cache is there costs nothing and is never
        held back; neither is another stream in a voice that is chosen. Voices that need a prefill are chosen as long as
        the padded prompts of all have at most `max_frames` frames, but only one of them while a listener is nearly dry:
        the chunks wait for the prefill. The most urgent come first, but where there are fewer free slots than streams,
        the listeners who already hear something: others would take the slot between two segments of a text.
        """
        dry = self._numbers.nearly_dry_seconds
        nearly_dry = any(left is not None and left < dry for left in audio_left)
        chosen: list[int] = []
        voices: set[bytes] = set()
        longest = 0
        for index in sorted(range(len(waiting)), key=lambda index: _urgency(waiting[index])):
            opening = waiting[index]
            if opening.frames and opening.voice not in voices:
                padded = max(longest, opening.frames) * (len(voices) + 1)
                if voices and (nearly_dry or padded > max_frames):
                    continue
                voices.add(opening.voice)
                longest = max(longest, opening.frames)
            chosen.append(index)
        if len(chosen) > free:
            chosen.sort(key=lambda index: waiting[index].audio_left is None)
        return chosen[:free]

    def worker_takes(self, worker: int, workers: int, waiting: Sequence[Candidate]) -> list[int]:
        """Return the indices of what a worker that is free may render now, of what no other worker has taken.

        Of two workers, FIRST_CHUNK_WORKER renders first chunks, unless they are gathered, and CHUNK_WORKER all others,
        or first chunks if there are no others.
        """
        if workers == 1:
            return list(range(len(waiting)))
        firsts = [index for index, request in enumerate(waiting) if request.first]
        if worker == FIRST_CHUNK_WORKER:
            return firsts if not self.gathers(waiting) else []
        return [index for index, request in enumerate(waiting) if not request.first] or firsts

    def gathers(self, waiting: Sequence[Candidate]) -> float:
        """Return for how many more seconds first chunks wait for others, because a crowd of later chunks waits too."""
        waited = [request.waited for request in waiting if request.first]
        later = sum(not request.first and request.tokens is not None for request in waiting)
        if later < self._numbers.crowd_chunks or not 0 < len(waited) < self._numbers.first_chunk_batch:
            return 0.0
        return max(0.0, self._numbers.gather_seconds - max(waited))

    def pick(
        self,
        waiting: Sequence[Candidate],
        max_chunks: int,
        max_tokens: int,
        padded: Callable[[int, int], int],
        *,
        waited_for: bool = True,
        among: Sequence[int] | None = None,
    ) -> list[int]:
        """Return the indices of the next batch, most urgent first, `among` those, not none, of `waiting`: by default of
        all.

        padded: how many tokens are computed for a number of chunks, given the tokens of the longest: every row costs as
        much as the longest, and a batch is filled with empty rows to the size of a CUDA graph. The most urgent chunk is
        always served. Of the batches of the most urgent chunks up to some length, one is chosen that renders the most
        tokens per second: a few chunks of any length share the fixed cost, many of one length waste nothing on padding.
        A batch of several chunks has at most `max_tokens` tokens, padding included; fewer if first chunks have to wait
        for it (`waited_for`), see `unhurried_share`. That bounds how long a chunk waits for the batch before it.
        """
        indices = range(len(waiting)) if among is None else among
        order = sorted(indices, key=lambda index: _urgency(waiting[index]))
        first = waiting[order[0]]
        if first.tokens is None:
            return order[:1]
        share = 1.0
        if waited_for:
            share = self._numbers.company_share if first.audio_left is None else self._numbers.unhurried_share
        chunks: list[tuple[int, int, int, float]] = []  # index, tokens, padded tokens, most tokens of a batch with it
        padded_tokens: set[int] = set()
        for index in order:
            request = waiting[index]
            if request.tokens is not None:
                most = max_tokens if self._is_urgent(request) else max_tokens * share
                chunks.append((index, request.tokens, padded(1, request.tokens), most))
                padded_tokens.add(chunks[-1][2])
        best, best_rate = order[:1], 0.0
        lengths = sorted(padded_tokens)
        at_least = lengths.index(padded(1, first.tokens))
        for low, high in product(lengths[: at_least + 1], lengths[at_least:]):
            batch: list[int] = []
            longest = own = 0  # tokens of the longest chunk, and of all
            for index, tokens, length, most in chunks:
                if not low <= length <= high:
                    continue
                longest, own = max(longest, tokens), own + tokens
                computed = padded(len(batch) + 1, longest)
                if batch and (len(batch) == max_chunks or longest * (len(batch) + 1) > most):
                    break  # nor can any later one join, which is less urgent
                batch.append(index)
                rate = own / (self._numbers.batch_start_tokens + computed)
                if rate > best_rate and (len(batch) == 1 or computed <= most):
                    best, best_rate = batch.copy(), rate
        return best

    def _is_urgent(self, request: Candidate) -> bool:
        return request.audio_left is None or request.audio_left < self._numbers.plenty_seconds


def _urgency(waiting: Opening | Candidate) -> tuple[bool, float, int]:
    """Return the sort key: no audio yet comes first, then when the listener runs out of audio, then arrival."""
    return waiting.audio_left is not None, waiting.audio_left or 0.0, waiting.arrived
