"""An engine with a thread of its own: the queue of requests, their answers and the end of the thread."""

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

import torch

from cosyvoice_triton.errors import FatalError, UnavailableError
from cosyvoice_triton.llm.engines.interface import GenerationRequest
from cosyvoice_triton.llm.interface import TokenChunk
from cosyvoice_triton.profiles import LLMNumbers

logger = logging.getLogger(__name__)

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
        """Pass new tokens or an error to `on_tokens`, unless it was cancelled."""
        if self.cancelled:
            return
        try:
            self.on_tokens(item)
        except RuntimeError:  # its event loop is closed
            self.cancel()


class Inbox:
    """The answers on their way to the tasks of one asyncio loop.

    The loop is woken once for all answers of a step: with a wake-up for each, the two threads would take the GIL from
    each other as often.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._answers: deque[tuple[OnTokens, TokenChunk | Exception]] = deque()
        self.readers = 0

    def add(self, on_tokens: OnTokens, item: TokenChunk | Exception) -> None:
        """Add an answer, for which the loop calls `on_tokens` after `wake`. Thread-safe.

        RuntimeError if the loop is closed.
        """
        if self._loop.is_closed():
            raise RuntimeError("the event loop is closed")
        self._answers.append((on_tokens, item))

    def wake(self) -> None:
        """Let the loop take the answers. Thread-safe."""
        if self._answers:
            with suppress(RuntimeError):  # the loop is closed, so nobody reads them
                self._loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        while self._answers:
            on_tokens, item = self._answers.popleft()
            on_tokens(item)


GenerationT = TypeVar("GenerationT", bound=Generation)


class ThreadedEngine(ABC, Generic[GenerationT]):
    """Serves up to `max_requests` live requests in its own thread, which calls `step` while there are any.

    If the thread fails, all live and later requests get FatalError.
    """

    def __init__(
        self,
        max_requests: int,
        rows: list[GenerationT],
        numbers: LLMNumbers,
        *,
        prepare: Callable[[], None] = lambda: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`rows` is an empty list, which the engine keeps, for the requests that are computed. The thread calls
        `prepare` first."""
        self._max_requests = max_requests
        self._numbers = numbers
        self._prepare, self._sleep = prepare, sleep
        self._waiting: deque[GenerationT] = deque()  # submitted, not yet in a row
        self._newcomers = False  # whether requests were submitted since the last look at the queue
        self._rows = rows
        self._inboxes: dict[asyncio.AbstractEventLoop, Inbox] = {}  # of the loops with readers
        self._submission = threading.Lock()  # held by who submits; an engine may hold it to be undisturbed
        # Guards the queue, the list of rows and the failure. Taken after `_submission`, and never twice.
        self._wake = threading.Condition(threading.Lock())
        self._failure: UnavailableError | None = None
        self._thread = threading.Thread(target=self._serve, name="llm-engine", daemon=True)

    def start(self) -> None:
        """Start the thread. Apart from the constructor, so that a test can call `step` by itself."""
        self._thread.start()

    @property
    def live(self) -> int:
        """Return the number of requests that occupy or wait for a row; a cancelled one counts until the next step."""
        with self._wake:
            return len(self._waiting) + len(self._rows)

    @abstractmethod
    def _accept(self, request: GenerationRequest, on_tokens: OnTokens) -> GenerationT:
        """Return the request as it will be computed. ValueError if it cannot be."""

    @abstractmethod
    def step(self) -> float:
        """Start waiting requests and compute those in rows; remove the finished and cancelled ones.

        Returns after how many seconds the next step is needed, unless a request comes before.
        """

    def submit(self, request: GenerationRequest, on_tokens: OnTokens) -> GenerationT:
        """Start a request. ValueError if it does not fit, UnavailableError if the engine is full, FatalError if it has
        failed."""
        generation = self._accept(request, on_tokens)
        with self._submission, self._wake:
            if self._failure:
                raise self._failure
            if len(self._waiting) + len(self._rows) >= self._max_requests and self._full():
                raise UnavailableError(f"the LLM already serves its maximum of {self._max_requests} requests")
            self._waiting.append(generation)
            self._newcomers = True
            crowd = len(self._waiting) % self._numbers.give_way_requests == 0
            self._wake.notify()
        if crowd:
            self._sleep(self._numbers.give_way_seconds)
        return generation

    def _full(self) -> bool:
        """Return whether it is full without the cancelled requests. It looks at each of them, so it is asked rarely."""
        return sum(not other.cancelled for other in (*self._waiting, *self._rows)) >= self._max_requests

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the tokens of one request as they are sampled. Closing the generator cancels the request."""
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
        """Yield the inbox of the running loop, for one more reader."""
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
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    def _serve(self) -> None:
        try:
            # On a CPU, more threads for such small operations take more time, and the cores from token2wav.
            torch.set_num_threads(1)
            self._prepare()
            while self._await_work():
                seconds = self.step()
                self._wake_readers()
                if seconds > 0:
                    self._rest(seconds)
        except BaseException as error:  # of any kind: nobody else would answer the requests
            logger.exception("the LLM engine failed")
            self._fail(FatalError(f"the LLM engine failed: {type(error).__name__}: {error}"))
        finally:
            with self._wake:
                self._rows.clear()

    def _wake_readers(self) -> None:
        """Hand over what was reported. It is called after each step; a longer step may call it earlier, too."""
        for inbox in list(self._inboxes.values()):
            inbox.wake()

    def _await_work(self) -> bool:
        """Wait for a request. Returns False if the engine has failed or is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._rows or self._failure)
            return self._failure is None

    def _rest(self, seconds: float) -> None:
        """Wait so long, or until a further request comes."""
        with self._wake:
            self._wake.wait_for(lambda: self._failure or self._newcomers, seconds)

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
