"""The requests that wait for a token2wav service's thread, in the order of arrival."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import UnavailableError
from common.token2wav.requests import Token2WavRequest
from common.token2wav.stream import Chunk

logger = logging.getLogger(__name__)

Reply = Callable[[np.ndarray | BaseException], None]


@dataclass(eq=False)
class QueuedRequest:
    """A request in the queue. `opened`: its stream was opened for it; `chunk` is made once its turn has come."""

    request: Token2WavRequest
    reply: Reply
    is_cancelled: Callable[[], bool]
    arrived: int  # its number in the order of arrival
    arrived_at: float
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


class RequestQueue:
    """Any thread adds; the service's thread takes.

    max_new: requests for new listeners that may wait in addition to those for which there are slots. max_other: those
    of the others, so that a crowd of new ones does not end what is being listened to.
    """

    def __init__(self, max_new: int, max_other: int, clock: Callable[[], float]):
        self._max_new = max_new
        self._max_other = max_other
        self._clock = clock
        self._waiting: list[QueuedRequest] = []
        self._arrivals = 0
        self._changed = threading.Condition()
        self.version = 0  # increases with each change by another thread
        self.refusal: UnavailableError | None = None  # why requests are refused, once the queue is closed

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Token2WavRequest, reply: Reply, is_cancelled: Callable[[], bool], free: int) -> None:
        """`free`: slots for new streams. Raises UnavailableError if the queue is full or closed; an abort only
        if it is closed."""
        with self._changed:
            if self.refusal:
                raise self.refusal
            new = _is_new(request)
            count = sum(_is_new(queued.request) == new for queued in self._waiting)
            if not request.aborts and count >= (self._max_new + free if new else self._max_other):
                kind = "for new streams" if new else "of open streams"
                raise UnavailableError(f"token2wav's queue is full: {count} requests {kind} wait")
            self._arrivals += 1
            self._waiting.append(QueuedRequest(request, reply, is_cancelled, self._arrivals, self._clock()))
            self._notify()

    def close(self, refusal: UnavailableError) -> None:
        """Refuse what comes from now on; the first reason stays."""
        with self._changed:
            self.refusal = self.refusal or refusal
            self._notify()

    def wait_for_change(self, version: int, seconds: float) -> None:
        """Return once a request is added or the queue is closed after that version, or after `seconds`."""
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


def _is_new(request: Token2WavRequest) -> bool:
    """Whether its listener has heard nothing yet; a later segment's start belongs to one who has."""
    return request.start is not False and request.audio_left is None
