"""What engines with a thread of their own have in common: a queue of requests, their answers, the end of the thread."""

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from cosyvoice_triton.errors import FatalError, UnavailableError
from cosyvoice_triton.llm.engines.interface import GenerationRequest
from cosyvoice_triton.llm.interface import TokenChunk

logger = logging.getLogger(__name__)

# Whoever submits a crowd gives way to the engine's thread each time so many requests wait. CPython's lock goes to a
# thread that has waited for it for a whole switch interval in which nobody let it go; the tokenizer lets it go, and
# takes it again before the engine's thread is awake, for each prompt.
GIVE_WAY_REQUESTS = 8
GIVE_WAY_SECONDS = 5e-5

# Called by the engine's thread with new tokens; the last call has a finish reason or is an error. Must not block.
OnTokens = Callable[[TokenChunk | Exception], object]


@dataclass(eq=False)
class Generation:
    """A live request, from `submit` until its last token, its error or its cancellation."""

    request: GenerationRequest
    on_tokens: OnTokens
    cancelled: bool = False

    def cancel(self) -> None:
        """Remove it at the next step, after which `on_tokens` is not called again. Thread-safe."""
        self.cancelled = True

    def report(self, item: TokenChunk | Exception) -> None:
        if self.cancelled:
            return
        try:
            self.on_tokens(item)
        except RuntimeError:  # its event loop is closed
            self.cancel()


class Inbox:
    """Answers on their way to the tasks of an asyncio loop. The loop is woken once for all answers of a step: a wake-up
    for each would make the two threads take the GIL from each other as often."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._answers: deque[tuple[OnTokens, TokenChunk | Exception]] = deque()
        self.readers = 0

    def add(self, on_tokens: OnTokens, item: TokenChunk | Exception) -> None:
        """From any thread; `on_tokens` is called in the loop, after `wake`. RuntimeError if the loop is closed."""
        if self._loop.is_closed():
            raise RuntimeError("the event loop is closed")
        self._answers.append((on_tokens, item))

    def wake(self) -> None:
        """From any thread."""
        if self._answers:
            with suppress(RuntimeError):  # the loop is closed, so nobody reads them
                self._loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        while self._answers:
            on_tokens, item = self._answers.popleft()
            on_tokens(item)


GenerationT = TypeVar("GenerationT", bound=Generation)


class ThreadedEngine(ABC, Generic[GenerationT]):
    """Serves up to `max_requests` live requests in its own thread, which calls `_step` while there are any.

    If the thread fails, all live and later requests get FatalError.
    """

    def __init__(self, max_requests: int, rows: list[GenerationT]) -> None:
        """Starts the thread: what `_step` uses must be there already. rows: an empty list, which it keeps."""
        self._max_requests = max_requests
        self._waiting: deque[GenerationT] = deque()  # submitted, not yet in a row
        self._rows = rows  # those that are computed
        self._inboxes: dict[asyncio.AbstractEventLoop, Inbox] = {}  # of the loops with readers
        self._wake = threading.Condition()  # guards the waiting queue, the list of rows and the failure
        self._failure: UnavailableError | None = None
        self._thread = threading.Thread(target=self._serve, name="llm-engine", daemon=True)
        self._thread.start()

    @property
    def live(self) -> int:
        """Requests that occupy or wait for a row; a cancelled one counts until the next step."""
        with self._wake:
            return len(self._waiting) + len(self._rows)

    @abstractmethod
    def _accept(self, request: GenerationRequest, on_tokens: OnTokens) -> GenerationT:
        """The request as it will be computed. ValueError if it cannot be."""

    @abstractmethod
    def _step(self) -> None:
        """Start waiting requests and compute those in rows; remove the finished and cancelled ones."""

    def submit(self, request: GenerationRequest, on_tokens: OnTokens) -> GenerationT:
        """Start a request. ValueError if it does not fit, UnavailableError if the engine is full, FatalError if it has
        failed."""
        generation = self._accept(request, on_tokens)
        with self._wake:
            if self._failure:
                raise self._failure
            if len(self._waiting) + len(self._rows) >= self._max_requests and self._running() >= self._max_requests:
                raise UnavailableError(f"the LLM already serves its maximum of {self._max_requests} requests")
            self._waiting.append(generation)
            crowd = len(self._waiting) % GIVE_WAY_REQUESTS == 0
            self._wake.notify()
        if crowd:
            time.sleep(GIVE_WAY_SECONDS)
        return generation

    def _running(self) -> int:
        """Requests that are not cancelled. Looks at each, so it is asked only where it matters."""
        return sum(not other.cancelled for other in (*self._waiting, *self._rows))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """The tokens of one request as they are sampled. Closing the generator cancels the request."""
        arrived: asyncio.Queue[TokenChunk | Exception] = asyncio.Queue()
        with self._inbox() as inbox:
            generation = self.submit(request, partial(inbox.add, arrived.put_nowait))
            try:
                finished = False
                while not finished:
                    item = await arrived.get()
                    if isinstance(item, Exception):
                        raise item
                    yield item
                    finished = item.finish_reason is not None
            finally:
                generation.cancel()

    @contextmanager
    def _inbox(self) -> Iterator[Inbox]:
        """The running loop's, for one more reader."""
        loop = asyncio.get_running_loop()
        inbox = self._inboxes.setdefault(loop, Inbox(loop))
        inbox.readers += 1
        try:
            yield inbox
        finally:
            inbox.readers -= 1
            if not inbox.readers:
                del self._inboxes[loop]

    def close(self) -> None:
        """Fail all live requests and end the thread."""
        self._fail(UnavailableError("the LLM engine is shut down"))
        self._thread.join()

    def _serve(self) -> None:
        try:
            while self._await_work():
                self._step()
                self._wake_readers()
        except Exception as error:
            logger.exception("the LLM engine failed")
            self._fail(FatalError(f"the LLM engine failed: {error}"))
        finally:
            with self._wake:
                self._rows.clear()

    def _wake_readers(self) -> None:
        """Hand over what was reported. After each step; a longer step may call it earlier."""
        for inbox in list(self._inboxes.values()):
            inbox.wake()

    def _await_work(self) -> bool:
        """Wait for a request; False if the engine has failed or is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._rows or self._failure)
            return self._failure is None

    def _fail(self, reason: UnavailableError) -> None:
        with self._wake:
            self._failure = self._failure or reason
            orphans = [*self._waiting, *self._rows]
            self._waiting.clear()
            self._wake.notify()
        for generation in orphans:
            generation.report(reason)
            generation.cancel()
        self._wake_readers()
