"""The owner of a token2wav model's streams.

`Token2WavService` has a thread that renders and a thread that sends replies. A stream's state, its queued requests and
its end belong to the first; `submit` only adds to the queue. A stream is freed in `_close`, whatever ends it: its final
chunk, an abort, an error, a cancellation, or `idle_seconds` without a request. `scheduler` picks the chunks of a batch.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from common.constants import SAMPLE_RATE
from common.errors import FatalError, UnavailableError
from common.process.metrics import (
    BATCHES,
    CACHE,
    CHUNKS,
    CONTEXT_WAITED,
    CONTEXTS,
    QUEUED,
    STREAMS,
    WAITED,
    Values,
)
from common.token2wav.engine import Token2Wav
from common.token2wav.requests import Token2WavRequest
from common.token2wav.scheduler import Candidate, pick
from common.token2wav.stream import Chunk, Stream
from common.voice.prompt import Prompt

logger = logging.getLogger(__name__)

SILENCE = np.zeros(0, np.float32)
REAP_SECONDS = 1.0
TEST_STREAM = "test"  # no client can name it
CANCEL_CHECK_SECONDS = 0.5  # requests that waited for less are not checked for cancellation
MAX_WAITING = 1024  # requests in the queue besides two for each stream: new streams that wait for a place


@dataclass
class LiveStream:
    """A live stream: the engine's part, and how much audio its listener has left."""

    stream: Stream
    prompt: Prompt
    used_at: float
    first_audio_at: float | None = None
    audio_seconds: float = 0.0

    def audio_left(self, now: float) -> float | None:
        """Seconds of audio that are not played yet, if playback began with the first chunk; None before that."""
        return None if self.first_audio_at is None else self.first_audio_at + self.audio_seconds - now

    def add(self, samples: int, now: float) -> None:
        """Count audio that was rendered."""
        self.used_at = now
        if samples:
            self.first_audio_at = now if self.first_audio_at is None else self.first_audio_at
            self.audio_seconds += samples / SAMPLE_RATE


@dataclass(eq=False)
class QueuedRequest:
    """A request in the queue. `chunk` is made once its turn within the stream has come."""

    request: Token2WavRequest
    reply: Callable[[np.ndarray | BaseException], None]
    is_cancelled: Callable[[], bool]
    arrived: int  # its number in the order of arrival
    arrived_at: float
    chunk: Chunk | None = None
    replied: bool = False


class Stats(NamedTuple):
    """`live_streams`, `queued`, `cache_bytes` and `contexts` are current values, the others sums since the start.

    `chunks` / `batches` is the mean batch size, `waited_seconds` / `chunks` the mean wait from a chunk's arrival to the
    start of its batch. `cache_bytes`: memory of streams and prompt caches. `contexts`: of the flow's TensorRT plans;
    `context_waited_seconds`: waiting for one of them.
    """

    live_streams: int
    queued: int
    cache_bytes: int
    batches: int
    chunks: int
    waited_seconds: float
    contexts: int
    context_waited_seconds: float

    def values(self) -> Values:
        """The same by metric."""
        metrics = (STREAMS, QUEUED, CACHE, BATCHES, CHUNKS, WAITED, CONTEXTS, CONTEXT_WAITED)
        return dict(zip(metrics, self, strict=True))


class Token2WavService:
    """Renders the chunks of all live streams in batches, most urgent first."""

    def __init__(
        self,
        engine: Token2Wav,
        *,
        idle_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._engine = engine
        self._limits = engine.limits
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._streams: dict[str, LiveStream] = {}
        self._idled: deque[str] = deque(maxlen=self._limits.max_streams)  # those freed last because they were idle
        self._queue: list[QueuedRequest] = []
        self._arrivals = 0
        self._batches = 0
        self._chunks = 0
        self._waited_seconds = 0.0
        self._refusal: UnavailableError | None = None  # why requests are refused
        self._wake = threading.Condition()
        # Replies are sent in order while the next batch is rendered: passing one to tritonserver takes milliseconds.
        self._replies = ThreadPoolExecutor(max_workers=1, thread_name_prefix="token2wav-replies")
        self._warm: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="token2wav", daemon=True)
        self._thread.start()
        self._warm.result()

    def submit(
        self,
        request: Token2WavRequest,
        reply: Callable[[np.ndarray | BaseException], None],
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Queue a request. `reply` is called exactly once, from a thread of the service, with audio or an exception.

        Raises UnavailableError at once when the queue is full or the service is closed.
        """
        with self._wake:
            if self._refusal:
                raise self._refusal
            if len(self._queue) >= 2 * self._limits.max_streams + MAX_WAITING:
                raise UnavailableError(f"token2wav's queue is full: {len(self._queue)} requests wait")
            self._arrivals += 1
            self._queue.append(QueuedRequest(request, reply, is_cancelled, self._arrivals, self._clock()))
            self._wake.notify()

    def stats(self) -> Stats:
        contexts, context_waited_seconds = self._engine.contexts
        with self._wake:
            return Stats(
                live_streams=len(self._streams),
                queued=len(self._queue),
                cache_bytes=self._engine.cache_bytes,
                batches=self._batches,
                chunks=self._chunks,
                waited_seconds=self._waited_seconds,
                contexts=contexts,
                context_waited_seconds=context_waited_seconds,
            )

    def test(self) -> None:
        """Render a small stream through the queue. Raises what a client would get, UnavailableError without a slot."""
        if (live := self.stats().live_streams) >= self._limits.max_streams:
            raise UnavailableError(f"all {live} streams are taken")
        reply: Future[np.ndarray | BaseException] = Future()
        prompt, tokens = self._engine.sample()
        stream = Token2WavRequest(TEST_STREAM, start=True, end=True, tokens=tokens, prompt=prompt, final=True)
        self.submit(stream, reply.set_result)
        if isinstance(result := reply.result(), BaseException):
            raise result

    def close(self) -> None:
        """Refuse what is queued with UnavailableError, free every stream, end the thread."""
        with self._wake:
            self._refusal = self._refusal or UnavailableError("token2wav is shutting down")
            self._wake.notify()
        self._thread.join()

    # --- the service's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._engine.warm_up()  # in this thread: the GPU libraries cache per thread
        except BaseException as error:
            self._warm.set_exception(error)
            return
        self._warm.set_result(None)
        batch: list[QueuedRequest] = []
        try:
            while batch := self._next():
                if wanted := [queued for queued in batch if not self._cancelled(queued)]:
                    self._serve(wanted)
        except Exception as error:
            logger.exception("token2wav has failed and refuses all requests")
            self._refusal = FatalError(f"token2wav has failed: {error}")
        with self._wake:
            left, self._queue = [*batch, *self._queue], []
        for queued in left:
            if not queued.replied:
                self._reply(queued, self._refusal or FatalError("token2wav has ended"))
        self._replies.shutdown()
        for stream_id in list(self._streams):
            self._close(stream_id)

    def _next(self) -> list[QueuedRequest]:
        """The next requests to serve together; none when the service closes. Frees idle streams while it waits."""
        with self._wake:
            while not self._refusal:
                self._reap()
                if ready := self._ready():
                    chosen = pick(self._candidates(ready), self._limits.max_chunks, self._engine.batch_tokens)
                    batch = [ready[index] for index in chosen]
                    taken = set(batch)
                    self._queue = [queued for queued in self._queue if queued not in taken]
                    return batch
                self._wake.wait(REAP_SECONDS)
            return []

    def _ready(self) -> list[QueuedRequest]:
        """What can be served now: everything, except that while all slots are taken, new streams wait for one."""
        if len(self._streams) < self._limits.max_streams:
            return self._queue
        waiting: set[str] = set()  # streams, whose later requests wait as well
        ready = []
        for queued in self._queue:
            if queued.request.stream_id in waiting or self._opens(queued.request):
                waiting.add(queued.request.stream_id)
            else:
                ready.append(queued)
        return ready

    def _opens(self, request: Token2WavRequest) -> bool:
        """Whether it opens a stream that is not live."""
        return request.start is not False and not request.whole and request.stream_id not in self._streams

    def _candidates(self, ready: Sequence[QueuedRequest]) -> list[Candidate]:
        """The scheduler's view of queued requests, which are in the order of arrival."""
        now = self._clock()
        candidates, seen = [], set()
        for queued in ready:
            stream_id = queued.request.stream_id
            live = self._streams.get(stream_id)
            first = stream_id not in seen  # later ones wait for it: their chunks cannot be checked yet
            seen.add(stream_id)
            candidates.append(
                Candidate(
                    stream_id=stream_id,
                    audio_left=live.audio_left(now) if live else None,
                    arrived=queued.arrived,
                    tokens=self._computed(queued, live) if first and live else None,
                )
            )
        return candidates

    def _computed(self, queued: QueuedRequest, live: LiveStream) -> int | None:
        """How many tokens are computed for the request; None if it is to be served alone."""
        request = queued.request
        if request.start or not request.has_chunk or request.speed != 1.0:
            return None
        try:
            queued.chunk = queued.chunk or self._chunk(live, request)
        except ValueError:
            return None  # served alone, which raises it again for the sender
        return queued.chunk.computed

    def _cancelled(self, queued: QueuedRequest) -> bool:
        """Whether the client has gone; its stream is then freed.

        The check is a call to tritonserver, a millisecond under load while the GPU waits, so it is made only where it
        can save much work.
        """
        waited = self._clock() - queued.arrived_at
        if not ((queued.request.whole or waited > CANCEL_CHECK_SECONDS) and _client_has_gone(queued)):
            return False
        self._close(queued.request.stream_id)
        self._reply(queued, asyncio.CancelledError())
        return True

    def _serve(self, batch: list[QueuedRequest]) -> None:
        """Answer a batch of chunks, or one request of another kind."""
        if len(batch) == 1:
            (queued,) = batch
            try:
                audio = self._without_rendering(queued.request)
                if audio is None and queued.chunk is None:
                    queued.chunk = self._chunk(self._streams[queued.request.stream_id], queued.request)
            except Exception as error:
                self._close(queued.request.stream_id)
                self._reply(queued, error)
                return
            if audio is not None:
                self._reply(queued, audio)
                return
        self._render(batch)

    def _render(self, batch: list[QueuedRequest]) -> None:
        """Render a batch of chunks and reply to each."""
        chunks = [queued.chunk for queued in batch if queued.chunk is not None]
        assert len(chunks) == len(batch)
        results: Sequence[np.ndarray | Exception]
        self._batches += 1
        self._chunks += len(batch)
        self._waited_seconds += sum(self._clock() - queued.arrived_at for queued in batch)
        try:
            results = self._engine.render(chunks)
        except Exception as error:  # one that no batch would survive
            results = [error] * len(batch)
        for queued, result in zip(batch, results, strict=True):
            live = self._streams[queued.request.stream_id]
            if isinstance(result, Exception) or queued.request.final:
                self._close(queued.request.stream_id)
            if not isinstance(result, Exception):
                live.add(len(result), self._clock())
            self._reply(queued, result)

    def _reply(self, queued: QueuedRequest, result: np.ndarray | BaseException) -> None:
        queued.replied = True
        self._replies.submit(_send, queued, result)

    def _without_rendering(self, request: Token2WavRequest) -> np.ndarray | None:
        """The reply to a request that renders no chunk: a whole utterance, a start or an end. None if there is one."""
        if request.whole:
            return self._engine.whole(_prompt_of(request), request.tokens, request.speed)
        if request.speed != 1.0:
            raise ValueError(f"speed {request.speed} is for whole utterances; a stream is rendered at speed 1")
        if request.start or self._opens(request):
            self._open(request)
        if request.aborts:
            self._close(request.stream_id)
            return SILENCE
        if request.stream_id not in self._streams:
            raise ValueError(
                f"{request.stream_id} is not live: it was not opened, has ended or failed, or was idle for "
                f"{self._idle_seconds:g} s"
            )
        return None if request.has_chunk else SILENCE

    def _chunk(self, live: LiveStream, request: Token2WavRequest) -> Chunk:
        if request.prompt is not None and not _same_voice(request.prompt, live.prompt):
            raise ValueError(f"{request.stream_id} began with another prompt: two streams have the same id")
        return self._engine.chunk(live.stream, request.tokens, final=bool(request.final), offset=request.offset)

    def _open(self, request: Token2WavRequest) -> None:
        self._close(request.stream_id)  # START on a live stream restarts it
        if request.start is None and request.stream_id in self._idled:
            self._idled.remove(request.stream_id)  # the sender knows now: the next request opens a stream
            raise ValueError(f"{request.stream_id} was idle for {self._idle_seconds:g} s and was freed")
        prompt = _prompt_of(request)
        self._streams[request.stream_id] = LiveStream(self._engine.open(prompt), prompt, used_at=self._clock())

    def _reap(self) -> None:
        waiting = {queued.request.stream_id for queued in self._queue}
        oldest = self._clock() - self._idle_seconds
        for stream_id in [i for i, s in self._streams.items() if s.used_at < oldest and i not in waiting]:
            logger.warning("%s was idle for %.0f s and was freed", stream_id, self._idle_seconds)
            self._close(stream_id)
            self._idled.append(stream_id)

    def _close(self, stream_id: str) -> None:
        if live := self._streams.pop(stream_id, None):
            self._engine.close(live.stream)


def _client_has_gone(queued: QueuedRequest) -> bool:
    try:
        return queued.is_cancelled()
    except Exception:  # an error with one request must not end the other streams
        logger.exception("cannot find out whether a client has disconnected")
        return False


def _send(queued: QueuedRequest, result: np.ndarray | BaseException) -> None:
    try:
        queued.reply(result)
    except Exception:  # a receiver's error must not end the other streams
        logger.exception("a reply failed")


def _same_voice(one: Prompt, other: Prompt) -> bool:
    return np.array_equal(one.tokens, other.tokens) and np.array_equal(one.embedding, other.embedding)


def _prompt_of(request: Token2WavRequest) -> Prompt:
    if request.prompt is None:
        raise ValueError(
            "the first request of a stream needs a voice: prompt_speech_tokens, prompt_speech_feat and "
            "prompt_spk_embedding"
        )
    return request.prompt
