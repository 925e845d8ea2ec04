"""The requests that wait for a token2wav service's thread, in the order of arrival."""

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cosyvoice_triton.constants import CALLS_AT_ONCE
from cosyvoice_triton.errors import OverloadedError, UnavailableError
from cosyvoice_triton.token2wav.policy.admission import Admission
from cosyvoice_triton.token2wav.policy.scheduler import Start
from cosyvoice_triton.token2wav.serving.requests import Token2WavRequest
from cosyvoice_triton.token2wav.stream import Chunk
from cosyvoice_triton.voice.prompt import Prompt

logger = logging.getLogger(__name__)

# Listeners who wait to be admitted, at most. Each keeps one of the orchestrator's calls; the other half is for the
# chunks and ends of the live streams, which make room for them.
MAX_WAITING = CALLS_AT_ONCE // 2

Reply = Callable[[np.ndarray | BaseException], None]


@dataclass(eq=False)
class QueuedRequest:
    """A request in the queue.

    new: the first one of a listener. admitted: not one that waits to be admitted. opened: its stream was opened for it.
    `chunk` is made once its turn has come.
    """

    request: Token2WavRequest
    reply: Reply
    is_cancelled: Callable[[], bool]
    arrived: int  # its number in the order of arrival
    arrived_at: float
    new: bool
    admitted: bool
    opened: bool = False
    chunk: Chunk | None = None
    replied: bool = False

    @property
    def stream_id(self) -> str:
        return self.request.stream_id

    def client_has_gone(self) -> bool:
        try:
            return self.is_cancelled()
        except Exception:  # an error with one request must not end the other streams
            logger.exception("cannot find out whether a client has disconnected")
            return False

    def send(self, result: np.ndarray | BaseException) -> None:
        """Reply; never raises."""
        try:
            self.reply(result)
        except Exception:  # a receiver's error must not end the other streams
            logger.exception("a reply failed")


class Starting(NamedTuple):
    """A queued request that opens a stream: its voice, and what decides when its turn comes."""

    queued: QueuedRequest
    prompt: Prompt
    start: Start


class RequestQueue:
    """Any thread adds; the service's thread takes. New listeners are admitted here, so that a refusal does not wait for
    that thread.

    max_start_wait: seconds that a new listener may wait to be admitted, if that is expected to be enough.
    """

    def __init__(self, admission: Admission, max_requests: int, max_start_wait: float, clock: Callable[[], float]):
        self._admission = admission
        self._max_requests = max_requests
        self._max_start_wait = max_start_wait
        self._clock = clock
        self._waiting: list[QueuedRequest] = []
        self._reserved: dict[str, float] = {}  # streams that are admitted and not opened: since when
        self._arrivals = 0
        self._changed = threading.Condition()
        self.version = 0  # increases with each change by another thread
        self.refusal: UnavailableError | None = None  # why requests are refused, once the queue is closed

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self, request: Token2WavRequest, reply: Reply, is_cancelled: Callable[[], bool], live: Collection[str]
    ) -> bool:
        """Queue a request. False if there is nothing to do: a place was reserved. live: the open streams.

        Raises UnavailableError if the queue is full or closed, OverloadedError for a listener who is not admitted; for
        an abort only if the queue is closed.
        """
        with self._changed:
            if self.refusal:
                raise self.refusal
            reserved = self._reserved.pop(request.stream_id, None) is not None
            if reserved and not request.aborts:
                request = replace(request, start=True)
            new = reserved or (request.first_of_listener and self._is_unknown(request.stream_id, live))
            admitted = reserved or not new or self._admit(live)
            if request.whole and (refusal := self._admission.ask_whole(self._count(lambda each: each.request.whole))):
                raise self._admission.count(refusal)
            if new and admitted and request.reserves:
                self._reserved[request.stream_id] = self._clock()
                return False
            if not new and not request.aborts and self._count(lambda each: each.admitted) >= self._max_requests:
                raise UnavailableError(f"token2wav's queue is full: {self._max_requests} requests wait")
            self._arrivals += 1
            queued = QueuedRequest(request, reply, is_cancelled, self._arrivals, self._clock(), new, admitted)
            self._waiting.append(queued)
            self._notify()
            return True

    def _is_unknown(self, stream_id: str, live: Collection[str]) -> bool:
        return stream_id not in live and all(queued.stream_id != stream_id for queued in self._waiting)

    def _admit(self, live: Collection[str]) -> bool:
        """Whether a listener who comes now is admitted at once. Raises OverloadedError unless they may wait."""
        ahead = self._count(lambda queued: not queued.admitted)
        refusal = self._admission.ask(self._listeners(live), ahead, self._clock())
        if refusal and (refusal.retry_after > self._max_start_wait or ahead >= MAX_WAITING):
            raise self._admission.count(refusal)
        return refusal is None

    def admit_waiting(self, live: Collection[str]) -> list[tuple[QueuedRequest, OverloadedError | None]]:
        """Ask again for the listeners who wait to be admitted, in order.

        Returns the requests that are to be taken and answered: those whose wait is over, with the reason, and those
        that only reserve a place, which are admitted now.
        """
        answered: list[tuple[QueuedRequest, OverloadedError | None]] = []
        with self._changed:
            now, refusal = self._clock(), None
            for queued in [queued for queued in self._waiting if not queued.admitted]:
                refusal = refusal or self._admission.ask(self._listeners(live), 0, now)
                if refusal is None:
                    queued.admitted = True
                    if queued.request.reserves:
                        self._reserved[queued.stream_id] = now
                        answered.append((queued, None))
                elif now - queued.arrived_at >= self._max_start_wait:
                    answered.append((queued, self._admission.count(refusal)))
            return answered

    def listeners(self, live: Collection[str]) -> int:
        """Live streams, and those that are admitted and not opened yet."""
        with self._changed:
            return self._listeners(live)

    def _listeners(self, live: Collection[str]) -> int:
        return (
            len(live) + len(self._reserved) + self._count(lambda each: each.new and each.admitted and not each.opened)
        )

    def _count(self, which: Callable[[QueuedRequest], bool]) -> int:
        return sum(map(which, self._waiting))

    @property
    def admits_later(self) -> bool:
        """Whether listeners wait to be admitted."""
        return any(not queued.admitted for queued in self.waiting())

    def drop_reserved(self, before: float) -> None:
        """Give up the places that were reserved before that time."""
        with self._changed:
            self._reserved = {stream_id: at for stream_id, at in self._reserved.items() if at >= before}

    def close(self, refusal: UnavailableError) -> None:
        """Refuse what comes from now on; the first reason stays."""
        with self._changed:
            self.refusal = self.refusal or refusal
            self._notify()

    def wake(self) -> None:
        """End `wait_for_change`."""
        with self._changed:
            self._notify()

    def wait_for_change(self, version: int, seconds: float) -> None:
        """Return once a request is added, the queue is closed or `wake` is called after that version, or after
        `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self.version != version, seconds)

    def waiting(self) -> list[QueuedRequest]:
        with self._changed:
            return list(self._waiting)

    def firsts(self) -> list[QueuedRequest]:
        """The first request of each stream: those whose turn within their stream has come."""
        firsts: dict[str, QueuedRequest] = {}
        for queued in self.waiting():
            firsts.setdefault(queued.stream_id, queued)
        return list(firsts.values())

    def take(self, requests: Sequence[QueuedRequest]) -> None:
        """Remove requests, because they are served now."""
        taken = set(requests)
        with self._changed:
            self._waiting = [queued for queued in self._waiting if queued not in taken]

    def _notify(self) -> None:
        self.version += 1
        self._changed.notify()
