"""Who owns the streams of a token2wav model, and who runs next.

`Token2WavService` has one thread. Everything about a stream - its state, its place in the queue, its end - belongs to
that thread; `submit` only puts a task into the queue. A stream is freed in `_close`, whatever ends it: its last chunk,
an abort, an error, a cancel, or silence for `idle_seconds`.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from common.constants import SAMPLE_RATE
from common.errors import UnavailableError
from common.prompt import Prompt
from common.token2wav.engine import Stream, Token2Wav
from common.token2wav.flows import Chunk

logger = logging.getLogger(__name__)

SILENCE = np.zeros(0, np.float32)
REAP_SECONDS = 1.0


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

    def urgency(self) -> tuple[int, float]:
        """Smaller runs earlier: streams that wait for their first audio, then the one that falls silent soonest."""
        if self.first_audio_at is None:
            return 0, 0.0
        return 1, self.first_audio_at + self.audio_seconds


@dataclass
class Task:
    request: ChunkRequest
    reply: Callable[[np.ndarray | BaseException], None]
    is_cancelled: Callable[[], bool]
    arrived: int = field(default=0)


class Stats(NamedTuple):
    live_streams: int
    queued: int


class Token2WavService:
    """Renders the chunks of all live streams, one at a time, most urgent first."""

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
        self._closing = False
        self._wake = threading.Condition()
        engine.warm_up()
        self._thread = threading.Thread(target=self._run, name="token2wav", daemon=True)
        self._thread.start()

    def submit(
        self,
        request: ChunkRequest,
        reply: Callable[[np.ndarray | BaseException], None],
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Queue a request. `reply` is called exactly once, from the service's thread, with audio or an exception.

        Raises UnavailableError at once when the queue is full or the service is closed.
        """
        with self._wake:
            if self._closing:
                raise UnavailableError("token2wav is shutting down")
            if len(self._queue) >= 2 * self._max_streams:
                raise UnavailableError(f"token2wav's queue is full: {len(self._queue)} chunks wait")
            self._arrivals += 1
            self._queue.append(Task(request, reply, is_cancelled, self._arrivals))
            self._wake.notify()

    def stats(self) -> Stats:
        with self._wake:
            return Stats(len(self._sessions), len(self._queue))

    def close(self) -> None:
        """Answer what is queued with UnavailableError, free every stream, end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    # --- the service's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (task := self._next()) is not None:
            self._answer(task)
        self._sessions.clear()
        for task in self._queue:
            task.reply(UnavailableError("token2wav is shutting down"))
        self._queue.clear()

    def _next(self) -> Task | None:
        """The most urgent task; None when the service closes. Frees idle streams while it waits."""
        with self._wake:
            while not self._closing:
                self._reap()
                if self._queue:
                    task = min(self._queue, key=self._order)
                    self._queue.remove(task)
                    return task
                self._wake.wait(REAP_SECONDS)
            return None

    def _order(self, task: Task) -> tuple[int, float, int]:
        session = self._sessions.get(task.request.stream_id)
        return (*(session.urgency() if session else (0, 0.0)), task.arrived)

    def _answer(self, task: Task) -> None:
        try:
            if task.is_cancelled():
                raise asyncio.CancelledError
            audio: np.ndarray | BaseException = self._process(task.request)
        except (Exception, asyncio.CancelledError) as error:
            self._close(task.request.stream_id)
            audio = error
        try:
            task.reply(audio)
        except Exception:  # the receiver's own mistake must not end every other stream
            logger.exception("a reply failed")

    def _process(self, request: ChunkRequest) -> np.ndarray:
        if request.offline:
            return self._engine.whole(_prompt_of(request), request.tokens, request.speed)
        if request.speed != 1.0:
            raise ValueError(f"speed {request.speed} is for whole utterances; a stream is rendered at speed 1")
        if request.start:
            self._open(request)
        if request.end and not request.finalize:
            self._close(request.stream_id)
            return SILENCE
        session = self._sessions.get(request.stream_id)
        if session is None:
            raise ValueError(
                f"stream {request.stream_id} is not live: it has ended, failed, or was idle for {self._idle_seconds} s"
            )
        if len(request.tokens) == 0 and not request.finalize:
            return SILENCE
        audio = self._render(session, request)
        if request.finalize:
            self._close(request.stream_id)
        return audio

    def _open(self, request: ChunkRequest) -> None:
        self._close(request.stream_id)  # a START on a live stream begins it anew
        if len(self._sessions) >= self._max_streams:
            raise UnavailableError(f"{len(self._sessions)} streams are live, which is the limit (max_streams)")
        stream = self._engine.open(_prompt_of(request))
        self._sessions[request.stream_id] = Session(stream, used_at=self._clock())

    def _render(self, session: Session, request: ChunkRequest) -> np.ndarray:
        chunk = Chunk(request.tokens, last=bool(request.finalize), offset=request.offset)
        audio = self._engine.step(session.stream, chunk)
        session.used_at = self._clock()
        if len(audio):
            session.first_audio_at = session.first_audio_at or session.used_at
            session.audio_seconds += len(audio) / SAMPLE_RATE
        return audio

    def _reap(self) -> None:
        waiting = {task.request.stream_id for task in self._queue}
        oldest = self._clock() - self._idle_seconds
        for stream_id in [i for i, s in self._sessions.items() if s.used_at < oldest and i not in waiting]:
            logger.warning("stream %d was idle for %.0f s and is freed", stream_id, self._idle_seconds)
            self._close(stream_id)

    def _close(self, stream_id: int) -> None:
        self._sessions.pop(stream_id, None)


def _prompt_of(request: ChunkRequest) -> Prompt:
    if request.prompt is None:
        raise ValueError(
            "the first request of a stream needs a voice: prompt_speech_tokens, prompt_speech_feat and "
            "prompt_spk_embedding"
        )
    return request.prompt
