"""The sessions of a token2wav service: what each stream is doing, and the requests that wait for it."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from cosyvoice_triton.audible import Playback
from cosyvoice_triton.constants import CALLS_AT_ONCE
from cosyvoice_triton.errors import OverloadedError, UnavailableError
from cosyvoice_triton.refusals import RefusalLog
from cosyvoice_triton.token2wav.policy.admission import Admission
from cosyvoice_triton.token2wav.serving.requests import Kind, Token2WavRequest
from cosyvoice_triton.token2wav.stream import Chunk, Stream
from cosyvoice_triton.voice.prompt import Prompt


class State(Enum):
    """What a session is doing."""

    RESERVED = auto()  # a place is kept for its listener, and nothing else is known
    WAITING = auto()  # it has no stream; its first request waits for one, or is a whole utterance
    OPENING = auto()  # its stream is being opened
    READY = auto()  # it has a stream, of which nothing is rendered now
    RENDERING = auto()  # its first request is rendered by a worker, and nothing else happens to it
    ENDED = auto()  # it is no longer in the table


@dataclass(eq=False)
class Session:
    """One stream, from its first request to its end, or a whole utterance.

    listens: whether it counts as a listener before it has a stream. used_at: when its place was reserved, or its last
    chunk delivered. requests: those without a reply, in order; a request is removed when it gets its reply.
    stream, voice: of the engine, while it has them. chunk: the first request's, once it is made. leaves: whether the
    last request is an abort.
    """

    id: str
    state: State
    listens: bool
    used_at: float
    requests: deque[Token2WavRequest] = field(default_factory=deque)
    stream: Stream | None = None
    voice: Prompt | None = None
    playback: Playback = field(default_factory=Playback)
    chunk: Chunk | None = None
    leaves: bool = False

    @property
    def is_listener(self) -> bool:
        """Return whether it takes a listener's place: not while the chunk is rendered that is the last for one who has
        left. Who gets the place waits for that chunk, and is not refused."""
        return (self.listens or self.stream is not None) and not self.leaves

    @property
    def first(self) -> Token2WavRequest:
        """Return the request that is served next, or now."""
        return self.requests[0]

    @property
    def is_schedulable(self) -> bool:
        """Return whether a request waits, and nothing is rendered."""
        return bool(self.requests) and self.state is not State.RENDERING

    @property
    def must_open(self) -> bool:
        """Return whether a stream has to be opened for the first request. START on a live stream restarts it."""
        first = self.requests[0]
        if first.start is False or first.kind is Kind.WHOLE or first.kind is Kind.ABORT:
            return False
        return bool(first.start) or self.stream is None

    def opened(self, stream: Stream, voice: Prompt, now: float) -> None:
        """Note that its stream is open: the first request continues it from now on."""
        self.first.start = False
        self.stream, self.voice, self.playback = stream, voice, Playback(self.first.audio_left, now)
        self.first.audio_left = None
        self.used_at, self.state = now, State.READY

    def correct_playback(self) -> None:
        """Count on what the first request says that its listener has, if it does."""
        if self.first.audio_left is not None:
            self.playback = Playback(self.first.audio_left, self.first.arrived_at)


class Sessions:
    """The table of all sessions.

    Any thread adds requests, and with them new sessions: listeners are admitted here, so that a refusal does not wait
    for the service's thread. Everything else is done by that thread.
    """

    def __init__(self, admission: Admission, max_streams: int, clock: Callable[[], float]) -> None:
        self._admission = admission
        self._log = RefusalLog()
        self._max_streams = max_streams
        # Each orchestrator has so many calls at once; streams have hardly ever two requests.
        self._max_requests = 2 * max_streams + CALLS_AT_ONCE
        self._clock = clock
        self._table: dict[str, Session] = {}
        self._idled: deque[str] = deque(maxlen=max_streams)  # those ended last because they were idle
        self._finished: dict[str, float] = {}  # when streams ended with their final chunk, by id
        self._arrivals = 0
        self._changed = threading.Condition(threading.RLock())  # reentrant: `add` counts sessions, too
        self.version = 0  # increases with each change by another thread
        self.refusal: UnavailableError | None = None  # why requests are refused, once the table is closed

    def __iter__(self) -> Iterator[Session]:
        with self._changed:
            return iter(list(self._table.values()))

    @property
    def streams(self) -> int:
        """Return how many sessions have a stream."""
        return sum(session.stream is not None for session in self)

    @property
    def free(self) -> int:
        """Return how many streams can be opened now."""
        return self._max_streams - self.streams

    @property
    def listeners(self) -> int:
        """Count the streams, and the places of listeners who are admitted and have none yet."""
        return sum(session.is_listener for session in self)

    @property
    def queued(self) -> int:
        """Count the requests that wait."""
        with self._changed:
            queued = 0
            for session in self._table.values():
                queued += len(session.requests) - (session.state is State.RENDERING)
            return queued

    @property
    def wholes(self) -> int:
        """Count the whole utterances that wait."""
        waiting = (session for session in self if session.state is not State.RENDERING)
        return sum(each.kind is Kind.WHOLE for session in waiting for each in session.requests)

    def add(self, request: Token2WavRequest) -> bool:
        """Queue a request. False if there is nothing to do: a place was reserved.

        Raises UnavailableError if the queue is full or closed, OverloadedError for a listener who is not admitted; for
        an abort only if the queue is closed.
        """
        with self._changed:
            if self.refusal:
                raise self.refusal
            session = self._table.get(request.stream_id)
            if session is None and request.start is not False and self._finished.pop(request.stream_id, None) is None:
                # Whoever has heard nothing of this stream is a new listener, whatever they say.
                request.audio_left = None
            new = session is None and request.first_of_listener
            reserved = session is not None and session.state is State.RESERVED
            self._check(request, new=new, has_place=new or reserved)
            now = self._clock()
            if session is None:
                session = self._table[request.stream_id] = Session(request.stream_id, State.WAITING, new, now)
            if (new or reserved) and request.kind is Kind.RESERVE:
                session.state, session.used_at = State.RESERVED, now
                return False
            if reserved:
                session.state = State.WAITING
                request.start = request.start if request.kind is Kind.ABORT else True
            self._arrivals += 1
            request.arrived, request.arrived_at = self._arrivals, now
            session.requests.append(request)
            session.leaves = request.kind is Kind.ABORT
            self.wake()
            return True

    def _check(self, request: Token2WavRequest, *, new: bool, has_place: bool) -> None:
        """Raise the error of a request that cannot be queued."""
        if new and (refusal := self._admission.ask(self.listeners, self._clock())):
            raise self._refused(refusal)
        if request.kind is Kind.WHOLE:
            if refusal := self._admission.ask_whole(self.wholes):
                raise self._refused(refusal)
        if not has_place and request.kind is not Kind.ABORT and self.queued >= self._max_requests:
            raise UnavailableError(f"token2wav's queue is full: {self._max_requests} requests wait")

    def _refused(self, refusal: OverloadedError) -> OverloadedError:
        self._log.note(refusal.reason)
        return self._admission.count(refusal)

    def schedulable(self) -> list[Session]:
        """Return the sessions of which a request waits and nothing is rendered."""
        with self._changed:
            return [session for session in self._table.values() if session.is_schedulable]

    def requests(self, session: Session) -> list[Token2WavRequest]:
        """Return the requests of a session that wait now; other threads add more at any time, so a loop over the queue
        itself would fail."""
        with self._changed:
            return list(session.requests)

    def answered(self, session: Session) -> Token2WavRequest:
        """Remove the first request of a session, which gets its reply now. The next one can be scheduled, or the
        session ends if it has neither requests nor a stream."""
        with self._changed:
            request, session.chunk = session.requests.popleft(), None
            if session.stream is not None:
                session.state = State.READY
            elif session.requests:
                session.state = State.WAITING
            else:
                self._remove(session)
            return request

    def finished(self, session: Session) -> None:
        """Take note that a stream has ended with its final chunk: the next one of its id has the same listener."""
        with self._changed:
            self._finished.pop(session.id, None)  # so that the dictionary is in the order of these times
            self._finished[session.id] = self._clock()

    def expire(self, before: float) -> list[Session]:
        """End the sessions without requests that nobody has used since then, and return them."""
        with self._changed:
            while self._finished and self._finished[oldest := next(iter(self._finished))] < before:
                del self._finished[oldest]
            idle = [each for each in self._table.values() if not each.requests and each.used_at < before]
            for session in idle:
                self._remove(session)
                if session.stream is not None:
                    self._idled.append(session.id)
            return idle

    def has_idled(self, session: Session) -> bool:
        """Return whether a stream of this id was freed because it was idle: its sender thinks that it is live. True
        once: the sender knows then, and the next request opens a stream."""
        if session.id not in self._idled:
            return False
        self._idled.remove(session.id)
        return True

    def _remove(self, session: Session) -> None:
        session.state = State.ENDED
        del self._table[session.id]

    def close(self, refusal: UnavailableError) -> None:
        """Refuse what comes from now on; the first reason stays."""
        with self._changed:
            self.refusal = self.refusal or refusal
            self.wake()
        self._log.write()

    def wake(self) -> None:
        """End `wait_for_change`."""
        with self._changed:
            self.version += 1
            self._changed.notify()

    def wait_for_change(self, version: int, seconds: float) -> None:
        """Return once a request is added, the table is closed or `wake` is called after that version, or after
        `seconds`."""
        with self._changed:
            if self.version == version:
                self._changed.wait(seconds)
