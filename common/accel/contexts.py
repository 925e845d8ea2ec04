"""Execution contexts of a TensorRT engine: a fixed number, each with a stream of its own, lent to one user at a time.

A context takes device memory for the largest shapes of its profile, so that there are few, and a user may have to wait.
What comes back after an error is thrown away and made anew for the next user: neither a slot nor the service is lost to
a request that failed.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from common.accel.network import Limits, Shape
from common.accel.streams import Stream
from common.errors import UnavailableError

logger = logging.getLogger(__name__)


@dataclass
class Slot:
    """A place of the pool. Its context is None before the first use after an error."""

    stream: Stream
    context: Any = None


@dataclass(frozen=True)
class PoolStatistics:
    """`size` contexts, `free` of them now. Since the pool was made: how often one was lent, how long users waited, in
    all and at most, how many gave up, and how many contexts were replaced after an error."""

    size: int
    free: int
    lent: int = 0
    waited_seconds: float = 0.0
    longest_wait_seconds: float = 0.0
    timeouts: int = 0
    replaced: int = 0


class ContextPool:
    """`make` returns a new context that works on the given stream; of `streams` there are as many as contexts."""

    def __init__(self, make: Callable[[Stream], Any], streams: list[Stream], limits: Limits) -> None:
        if not streams:
            raise ValueError("a pool needs at least 1 context, not 0")
        self.limits = limits
        self._make = make
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for stream in streams:
            self._free.put(Slot(stream, make(stream)))
        self._lock = threading.Lock()
        self._statistics = PoolStatistics(size=len(streams), free=len(streams))

    @contextmanager
    def context(self, shapes: Mapping[str, Shape], *, timeout: float) -> Iterator[Slot]:
        """A context for inputs of these shapes, and its stream, for the length of the body.

        ValueError for shapes outside the limits, before anything is taken; UnavailableError where none is free within
        `timeout` seconds.
        """
        self.limits.check(shapes)
        began = time.monotonic()
        slot = self._take(timeout)
        try:
            self._count(waited=time.monotonic() - began, lent=1)
            if slot.context is None:
                slot.context = self._make(slot.stream)
                self._count(replaced=1)
            yield slot
        except BaseException:
            self._discard(slot)
            raise
        finally:
            self._free.put(slot)

    def statistics(self) -> PoolStatistics:
        with self._lock:
            return replace(self._statistics, free=self._free.qsize())

    def _take(self, timeout: float) -> Slot:
        try:
            return self._free.get(timeout=timeout)
        except queue.Empty:
            self._count(waited=timeout, timeouts=1)
            size = self._statistics.size
            raise UnavailableError(
                f"no TensorRT context came free within {timeout:g} s; there are {size}, all in use"
            ) from None

    def _discard(self, slot: Slot) -> None:
        """A context may not go while its work is under way."""
        try:
            slot.stream.drain()
        except RuntimeError as error:  # CUDA's own: the caller's exception is on its way already
            logger.error("a TensorRT context's stream failed: %s", error)
        slot.context = None

    def _count(self, *, waited: float = 0.0, lent: int = 0, timeouts: int = 0, replaced: int = 0) -> None:
        with self._lock:
            before = self._statistics
            self._statistics = replace(
                before,
                lent=before.lent + lent,
                waited_seconds=before.waited_seconds + waited,
                longest_wait_seconds=max(before.longest_wait_seconds, waited),
                timeouts=before.timeouts + timeouts,
                replaced=before.replaced + replaced,
            )
