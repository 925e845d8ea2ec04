"""A pool of execution contexts of a TensorRT engine: a fixed number, each with its own stream, for one user at a time.

A context takes device memory for the largest shapes of its profile, so there are few (`flow_contexts` in the settings
of token2wav), and a user may have to wait. A context that was in use when an error occurred is replaced for the next
user, so that a failed request costs neither a slot nor the service.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.runtimes.network import Shape, ShapeLimits
from cosyvoice_triton.runtimes.streams import WorkStream

logger = logging.getLogger(__name__)


@dataclass
class Slot:
    """One slot of the pool. Its context is None after an error, until the next use."""

    stream: WorkStream
    context: Any = None


class ContextPool:
    """Lends `size` contexts. waited_seconds: how long all users together have waited for a free one.

    make: returns a new context that runs on the given stream; streams: one per context.
    """

    def __init__(self, make: Callable[[WorkStream], Any], streams: list[WorkStream], limits: ShapeLimits) -> None:
        self.limits = limits
        self._make = make
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for stream in streams:
            self._free.put(Slot(stream, make(stream)))
        self._lock = threading.Lock()
        self.size, self.waited_seconds = len(streams), 0.0

    @contextmanager
    def context(self, shapes: Mapping[str, Shape], *, timeout: float) -> Iterator[Slot]:
        """Acquire a slot for inputs of these shapes for the body of the `with` statement.

        ValueError for shapes outside the limits, before a slot is acquired; UnavailableError if none becomes free
        within `timeout` seconds.
        """
        self.limits.check(shapes)
        slot = self._take(timeout)
        try:
            if slot.context is None:
                slot.context = self._make(slot.stream)
            yield slot
        except BaseException:
            self._discard(slot)
            raise
        finally:
            self._free.put(slot)

    def _take(self, timeout: float) -> Slot:
        began = time.monotonic()
        try:
            return self._free.get(timeout=timeout)
        except queue.Empty:
            raise UnavailableError(
                f"no TensorRT context became free within {timeout:g} s; there are {self.size}, all in use "
                "(flow_contexts)"
            ) from None
        finally:
            with self._lock:
                self.waited_seconds += time.monotonic() - began

    def _discard(self, slot: Slot) -> None:
        """Drop the context, after its work has ended: TensorRT does not allow it earlier."""
        try:
            slot.stream.drain()
        except RuntimeError as error:  # CUDA's own; the caller's exception is being raised already
            logger.error("a TensorRT context's stream failed: %s", error)
        slot.context = None
