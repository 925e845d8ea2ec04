"""Which queued streams are opened next, and which chunks are rendered in one batch. Pure policy: no streams, no
tensors, no clock."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

# A worker renders one batch at a time. If there are two, the second one renders first chunks and prompts, and the first
# one everything else: see `worker_takes`.
CHUNK_WORKER, FIRST_CHUNK_WORKER = 0, 1
# The fixed cost of a batch, in tokens: 12 ms on an H200, where a token takes 0.04 ms. Measured with the DiT flow
# (docs/results/speed.md); the UNet's ratio is about the same.
START_TOKENS = 300
# A listener with this much audio left can wait. Chunks for such listeners fill a batch up to UNHURRIED_SHARE of the
# tokens, so that a new stream waits less for them, and up to COMPANY_SHARE if the batch has a first chunk. If the GPU
# cannot keep up that way, listeners soon have less audio left, and batches grow.
PLENTY_SECONDS = 1.0
UNHURRIED_SHARE = 0.5
COMPANY_SHARE = 0.25
# While a listener with a queued chunk has less audio left than this, one voice at a time is prefilled.
NEARLY_DRY_SECONDS = 0.25
# While so many later chunks wait, first chunks do too, for a batch of START_BATCH or until one of them has waited this
# long: eight of them take half as long again as one, and the GPU is the others' meanwhile.
CROWD_CHUNKS = 16
GATHER_SECONDS = 0.1
START_BATCH = 8  # first chunks, or prompts, of a batch of their own
# Nobody listens to a whole utterance while it is rendered: it waits this long for the listeners, and after that for
# those who are nearly dry.
WHOLE_SECONDS = 5.0


class Start(NamedTuple):
    """A queued start of a stream.

    voice: what starts of one voice have in common. frames: mel frames to prefill, 0 if the voice's prompt cache is
    there. audio_left: as in `Candidate`; a later segment's listener may still play the one before. arrived: likewise.
    """

    voice: bytes
    frames: int
    audio_left: float | None
    arrived: int

    @property
    def urgency(self) -> tuple[bool, float, int]:
        return _urgency(self.audio_left, self.arrived)


class Candidate(NamedTuple):
    """A queued request as the policy sees it, the first one of its stream.

    audio_left: seconds until its listener runs out of audio, negative after that; None before the first audio.
    arrived: its number in the order of arrival.
    tokens: how many are computed for it; None if it is served alone (a whole utterance, an invalid chunk).
    start: whether it is a first chunk that FIRST_CHUNK_WORKER renders.
    waited: seconds in the queue.
    """

    audio_left: float | None
    arrived: int
    tokens: int | None
    start: bool = False
    waited: float = 0.0

    @property
    def urgent(self) -> bool:
        return self.audio_left is None or self.audio_left < PLENTY_SECONDS


def patience(waited: float) -> float:
    """Of a whole utterance that has waited so long: the audio that an equally urgent listener has left."""
    return max(NEARLY_DRY_SECONDS, WHOLE_SECONDS - waited)


def starts(waiting: Sequence[Start], audio_left: Sequence[float | None], max_frames: int, free: int) -> list[int]:
    """Indices of the streams to open before the next batch of chunks, at most `free`. `waiting` is not empty.

    audio_left: of the queued chunks' listeners. A start whose prompt cache is there costs nothing and is never held
    back; neither is another start of a voice that is chosen. Voices that need a prefill are chosen as long as the
    padded prompts of all have at most `max_frames` frames, but only one of them while a listener is nearly dry: the
    chunks wait for the prefill. The most urgent come first, but where there are fewer free slots than starts, the
    listeners who already hear something: others would take the slot between two segments of a text.
    """
    nearly_dry = any(left is not None and left < NEARLY_DRY_SECONDS for left in audio_left)
    chosen: list[int] = []
    voices: set[bytes] = set()
    longest = 0
    for index in sorted(range(len(waiting)), key=lambda index: waiting[index].urgency):
        start = waiting[index]
        if start.frames and start.voice not in voices:
            padded = max(longest, start.frames) * (len(voices) + 1)
            if voices and (nearly_dry or padded > max_frames):
                continue
            voices.add(start.voice)
            longest = max(longest, start.frames)
        chosen.append(index)
    if len(chosen) > free:
        chosen.sort(key=lambda index: waiting[index].audio_left is None)
    return chosen[:free]


def worker_takes(worker: int, workers: int, waiting: Sequence[Candidate]) -> list[int]:
    """Indices of what a worker that is free may render now, given what no other worker has taken.

    Of two workers, FIRST_CHUNK_WORKER renders first chunks, gathered while a crowd waits (CROWD_CHUNKS), and
    CHUNK_WORKER all others, or first chunks if there are no others.
    """
    if workers == 1:
        return list(range(len(waiting)))
    firsts = [index for index, request in enumerate(waiting) if request.start]
    if worker == FIRST_CHUNK_WORKER:
        return firsts if _are_gathered(waiting) else []
    return [index for index, request in enumerate(waiting) if not request.start] or firsts


def _are_gathered(waiting: Sequence[Candidate]) -> bool:
    """Whether the first chunks are to be rendered now."""
    later = sum(not request.start and request.tokens is not None for request in waiting)
    waited = [request.waited for request in waiting if request.start]
    return later < CROWD_CHUNKS or len(waited) >= START_BATCH or max(waited, default=0.0) >= GATHER_SECONDS


def pick(
    waiting: Sequence[Candidate],
    max_chunks: int,
    max_tokens: int,
    padded: Callable[[int, int], int],
    *,
    waited_for: bool = True,
) -> list[int]:
    """Indices of the next batch, most urgent first. `waiting` is not empty.

    padded: how many tokens are computed for a number of chunks, given the tokens of the longest: every row costs as
    much as the longest, and a batch is filled with empty rows to the size of a CUDA graph. The most urgent chunk is
    always served. Of the batches of the most urgent chunks up to some length, one is chosen that renders the most
    tokens per second: a few chunks of any length share the fixed cost, many of one length waste nothing on padding. A
    batch of several chunks has at most `max_tokens` tokens, padding included; if first chunks have to wait for it
    (`waited_for`), see UNHURRIED_SHARE. That bounds how long a chunk waits for the batch before it.
    """
    urgency = [_urgency(request.audio_left, request.arrived) for request in waiting]
    order = sorted(range(len(waiting)), key=urgency.__getitem__)
    first = waiting[order[0]]
    if first.tokens is None:
        return order[:1]
    share = 1.0
    if waited_for:
        share = COMPANY_SHARE if first.audio_left is None else UNHURRIED_SHARE
    chunks: list[tuple[int, int, int, float]] = []  # index, tokens, padded tokens, most tokens of a batch with it
    for index in order:
        request = waiting[index]
        if request.tokens is not None:
            most = max_tokens if request.urgent else max_tokens * share
            chunks.append((index, request.tokens, padded(1, request.tokens), most))
    best, best_rate = order[:1], 0.0
    lengths = sorted({length for _, _, length, _ in chunks})
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
            rate = own / (START_TOKENS + computed)
            if rate > best_rate and (len(batch) == 1 or computed <= most):
                best, best_rate = batch.copy(), rate
    return best


def _urgency(audio_left: float | None, arrived: int) -> tuple[bool, float, int]:
    """Sort key: streams without audio first, then by when the listener runs out of audio, then by arrival."""
    return audio_left is not None, audio_left or 0.0, arrived
