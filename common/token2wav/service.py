"""Who owns the streams of a token2wav model.

`Token2WavService` has one thread for them, and one that sends the answers. Everything about a stream - its state, its
place in the queue, its end - belongs to the first; `submit` only puts a task into the queue. A stream is freed in
`_close`, whatever ends it: its last chunk, an abort, an error, a cancel, or silence for `idle_seconds`. `scheduler`
says which chunks are rendered together.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from common.constants import SAMPLE_RATE
from common.errors import UnavailableError
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
from common.token2wav.engine import Stream, Token2Wav
from common.token2wav.scheduler import Waiting, pick
from common.token2wav.streaming import Chunk
from common.voice.prompt import Prompt

logger = logging.getLogger(__name__)

SILENCE = np.zeros(0, np.float32)
REAP_SECONDS = 1.0
PATIENCE_SECONDS = 0.5  # a client that asked no longer ago is taken to be there still
MAX_BATCH = 64


@dataclass(frozen=True)
class ChunkRequest:
    """One request of a stream, as a sequence model of Triton receives it.

    start: opens the stream in the voice of `prompt`; `tokens` may be empty, then only the voice's caches are built.
    end: closes the stream. Without `finalize` the stream is dropped and no audio is made (an abort).
    finalize: the tokens are the stream's last. None on a request that both starts and ends a stream without an offset:
        the whole utterance at once, without chunks.
    speed: speaking rate of such an utterance; a stream is rendered at 1.
    """

    stream_id: int
    start: bool
    end: bool
    tokens: np.ndarray
    prompt: Prompt | None = None
    offset: int | None = None
    finalize: bool | None = None
    speed: float = 1.0

    @property
    def offline(self) -> bool:
        return self.start and self.end and self.finalize is None and self.offset is None


@dataclass
class Session:
    """A live stream: what the engine keeps of it, and how far its audio reaches."""

    stream: Stream
    used_at: float
    first_audio_at: float | None = None
    audio_seconds: float = 0.0

    def audio_left(self, now: float) -> float | None:
        """Seconds that the listener has not heard yet, if it plays from the first chunk on."""
        return None if self.first_audio_at is None else self.first_audio_at + self.audio_seconds - now

    def heard(self, samples: int, now: float) -> None:
        """Note audio that was rendered."""
        self.used_at = now
        if samples:
            self.first_audio_at = now if self.first_audio_at is None else self.first_audio_at
            self.audio_seconds += samples / SAMPLE_RATE


@dataclass(eq=False)
class Task:
    request: ChunkRequest
    reply: Callable[[np.ndarray | BaseException], None]
    is_cancelled: Callable[[], bool]
    arrived: int
    arrived_at: float


class Stats(NamedTuple):
    """`live_streams`, `queued` and `cache_bytes` now, the others summed up since the start.

    `chunks` / `batches` is the mean size of a batch, `waited_seconds` / `chunks` the mean wait from a chunk's arrival
    to the beginning of its batch. `cache_bytes`: what the streams' and the voices' memory takes. `contexts`: of the
    flow's TensorRT plans; `context_waited_seconds`: for one of them.
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
        """As metrics."""
        metrics = (STREAMS, QUEUED, CACHE, BATCHES, CHUNKS, WAITED, CONTEXTS, CONTEXT_WAITED)
        return dict(zip(metrics, self, strict=True))


class Token2WavService:
    """Renders the chunks of all live streams, most urgent first, several together."""

    def __init__(
        self,
        engine: Token2Wav,
        *,
        max_streams: int,
        idle_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._engine = engine
        self._max_streams = max_streams
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._sessions: dict[int, Session] = {}
        self._queue: list[Task] = []
        self._arrivals = 0
        self._batches = 0
        self._chunks = 0
        self._waited_seconds = 0.0
        self._refusal: str | None = None  # why nothing is taken any more
        self._wake = threading.Condition()
        # Answers in their order, while the next batch is rendered: handing them to tritonserver takes milliseconds.
        self._replies = ThreadPoolExecutor(max_workers=1, thread_name_prefix="token2wav-replies")
        self._warm: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="token2wav", daemon=True)
        self._thread.start()
        self._warm.result()

    def submit(
        self,
        request: ChunkRequest,
        reply: Callable[[np.ndarray | BaseException], None],
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Queue a request. `reply` is called exactly once, from a thread of the service, with audio or an exception.

        Raises UnavailableError at once when the queue is full or the service is closed.
        """
        with self._wake:
            if self._refusal:
                raise UnavailableError(self._refusal)
            if len(self._queue) >= 2 * self._max_streams:
                raise UnavailableError(f"token2wav's queue is full: {len(self._queue)} chunks wait")
            self._arrivals += 1
            self._queue.append(Task(request, reply, is_cancelled, self._arrivals, self._clock()))
            self._wake.notify()

    def stats(self) -> Stats:
        contexts, context_waited_seconds = self._engine.contexts
        with self._wake:
            return Stats(
                live_streams=len(self._sessions),
                queued=len(self._queue),
                cache_bytes=self._engine.cache_bytes,
                batches=self._batches,
                chunks=self._chunks,
                waited_seconds=self._waited_seconds,
                contexts=contexts,
                context_waited_seconds=context_waited_seconds,
            )

    def close(self) -> None:
        """Answer what is queued with UnavailableError, free every stream, end the thread."""
        with self._wake:
            self._refusal = self._refusal or "token2wav is shutting down"
            self._wake.notify()
        self._thread.join()

    # --- the service's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._engine.warm_up()  # in this thread: the GPU libraries keep what they prepare per thread
        except BaseException as error:
            self._warm.set_exception(error)
            return
        self._warm.set_result(None)
        try:
            while tasks := self._next():
                if wanted := [task for task in tasks if not self._dropped(task)]:
                    self._serve(wanted)
        except Exception as error:
            logger.exception("token2wav has failed; nothing is rendered any more")
            self._refusal = f"token2wav has failed: {error}"
        with self._wake:
            left, self._queue = self._queue, []
        for task in left:
            self._tell(task, UnavailableError(self._refusal or ""))
        self._replies.shutdown()
        for stream_id in list(self._sessions):
            self._close(stream_id)

    def _next(self) -> list[Task]:
        """The next tasks to do together; none when the service closes. Frees idle streams while it waits."""
        with self._wake:
            while not self._refusal:
                self._reap()
                if self._queue:
                    tasks = self._ready()
                    chosen = pick(self._waiting(tasks), MAX_BATCH, self._engine.batch_tokens)
                    tasks = [tasks[index] for index in chosen]
                    self._queue = [task for task in self._queue if task not in tasks]
                    return tasks
                self._wake.wait(REAP_SECONDS)
            return []

    def _ready(self) -> list[Task]:
        """What can be done now: all, but while no place is free those of new streams wait for the ends that are queued.

        Triton gives a place to the next stream as soon as it has handed us the end of the last; which of the two is
        more urgent here must not decide whether there is a place.
        """
        if len(self._sessions) < self._max_streams:
            return self._queue
        live = [task for task in self._queue if task.request.offline or task.request.stream_id in self._sessions]
        return live if any(task.request.end and not task.request.offline for task in live) else self._queue

    def _waiting(self, tasks: Sequence[Task]) -> list[Waiting]:
        now = self._clock()
        waiting = []
        for task in tasks:
            session = self._sessions.get(task.request.stream_id)
            waiting.append(
                Waiting(
                    stream_id=task.request.stream_id,
                    audio_left=session.audio_left(now) if session else None,
                    arrived=task.arrived,
                    tokens=self._tokens(task.request),
                )
            )
        return waiting

    def _tokens(self, request: ChunkRequest) -> int | None:
        """How many tokens are computed for the request; None where it renders no chunk of a live stream."""
        session = self._sessions.get(request.stream_id)
        aborts = request.end and not request.finalize
        idles = len(request.tokens) == 0 and not request.finalize
        if session is None or request.start or aborts or idles or request.speed != 1.0:
            return None
        try:
            return self._engine.tokens(session.stream, _chunk_of(request))
        except ValueError:
            return None  # served alone: the sender is told when it comes to be rendered

    def _dropped(self, task: Task) -> bool:
        """Whether the sender has gone away; its stream goes with it.

        Asking waits for tritonserver, a millisecond under load, and the GPU waits along. So it is asked only where it
        could save much.
        """
        waited = self._clock() - task.arrived_at
        if not ((task.request.offline or waited > PATIENCE_SECONDS) and task.is_cancelled()):
            return False
        self._close(task.request.stream_id)
        self._tell(task, asyncio.CancelledError())
        return True

    def _serve(self, tasks: list[Task]) -> None:
        """Answer a batch of chunks, or one request of another kind."""
        if len(tasks) == 1:
            (task,) = tasks
            try:
                answer = self._without_rendering(task.request)
            except Exception as error:
                self._close(task.request.stream_id)
                self._tell(task, error)
                return
            if answer is not None:
                self._tell(task, answer)
                return
        self._render(tasks)

    def _render(self, tasks: list[Task]) -> None:
        """Render a batch of chunks and answer each."""
        sessions = [self._sessions[task.request.stream_id] for task in tasks]
        batch = [(session.stream, _chunk_of(task.request)) for session, task in zip(sessions, tasks, strict=True)]
        results: Sequence[np.ndarray | Exception]
        self._batches += 1
        self._chunks += len(batch)
        self._waited_seconds += sum(self._clock() - task.arrived_at for task in tasks)
        try:
            results = self._engine.step(batch)
        except Exception as error:
            results = [error] * len(batch)
        for task, session, result in zip(tasks, sessions, results, strict=True):
            if isinstance(result, Exception) or task.request.finalize:
                self._close(task.request.stream_id)
            if not isinstance(result, Exception):
                session.heard(len(result), self._clock())
            self._tell(task, result)

    def _tell(self, task: Task, result: np.ndarray | BaseException) -> None:
        self._replies.submit(_reply, task, result)

    def _without_rendering(self, request: ChunkRequest) -> np.ndarray | None:
        """The answer to what renders no chunk: whole utterances, starts, ends. None if a chunk is to be rendered."""
        if request.offline:
            return self._engine.whole(_prompt_of(request), request.tokens, request.speed)
        if request.speed != 1.0:
            raise ValueError(f"speed {request.speed} is for whole utterances; a stream is rendered at speed 1")
        if request.start:
            self._open(request)
        if request.end and not request.finalize:
            self._close(request.stream_id)
            return SILENCE
        if request.stream_id not in self._sessions:
            raise ValueError(
                f"stream {request.stream_id} is not live: it has ended, failed, or was idle for {self._idle_seconds} s"
            )
        return SILENCE if len(request.tokens) == 0 and not request.finalize else None

    def _open(self, request: ChunkRequest) -> None:
        self._close(request.stream_id)  # a START on a live stream begins it anew
        if len(self._sessions) >= self._max_streams:
            raise UnavailableError(f"{len(self._sessions)} streams are live, which is the limit (max_streams)")
        stream = self._engine.open(_prompt_of(request))
        self._sessions[request.stream_id] = Session(stream, used_at=self._clock())

    def _reap(self) -> None:
        waiting = {task.request.stream_id for task in self._queue}
        oldest = self._clock() - self._idle_seconds
        for stream_id in [i for i, s in self._sessions.items() if s.used_at < oldest and i not in waiting]:
            logger.warning("stream %d was idle for %.0f s and is freed", stream_id, self._idle_seconds)
            self._close(stream_id)

    def _close(self, stream_id: int) -> None:
        if session := self._sessions.pop(stream_id, None):
            self._engine.close(session.stream)


def _reply(task: Task, result: np.ndarray | BaseException) -> None:
    try:
        task.reply(result)
    except Exception:  # the receiver's own mistake must not end every other stream
        logger.exception("a reply failed")


def _chunk_of(request: ChunkRequest) -> Chunk:
    return Chunk(request.tokens, last=bool(request.finalize), offset=request.offset)


def _prompt_of(request: ChunkRequest) -> Prompt:
    if request.prompt is None:
        raise ValueError(
            "the first request of a stream needs a voice: prompt_speech_tokens, prompt_speech_feat and "
            "prompt_spk_embedding"
        )
    return request.prompt
