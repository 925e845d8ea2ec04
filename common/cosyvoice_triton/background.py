"""An asyncio loop in a thread of its own, for objects that are used from other threads and loops."""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from contextlib import aclosing
from typing import Any, TypeVar, cast

import uvloop

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines and asynchronous generators; any number of threads may use it at the same time."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()  # a wake-up of asyncio's own loop takes longer
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the result of `work`. Must not be called by the loop's own tasks."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work` in the caller's loop. Cancelling it cancels the work."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield `items` as they come. Closing the iterator closes them."""
        received: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        work = asyncio.run_coroutine_threadsafe(_forward(items, received.put), self._loop)
        work.add_done_callback(lambda _: received.put(None))
        try:
            while (item := received.get()) is not None:
                yield item
            work.result()  # raises its error
        finally:
            work.cancel()

    async def aiterate(self, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Yield `items` in the caller's loop, as they come. Closing the generator closes them."""
        caller, received = asyncio.get_running_loop(), asyncio.Queue[T | None]()

        def put(item: T | None) -> None:
            caller.call_soon_threadsafe(received.put_nowait, item)

        work = asyncio.run_coroutine_threadsafe(_forward(items, put), self._loop)
        ended = asyncio.wrap_future(work)
        ended.add_done_callback(lambda _: received.put_nowait(None))
        try:
            while (item := await received.get()) is not None:
                yield item
            await ended  # raises its error
        finally:
            ended.cancel()

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel all work, wait for its end and for that of `last`, and stop; the loop cannot be used afterwards."""
        if self._loop.is_closed():
            return
        self.run(_cancel_all())
        if last is not None:
            self.run(last())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def in_thread(items: Iterable[T]) -> AsyncGenerator[T, None]:
    """Yield `items`, whose iterator may block."""
    iterator, end = iter(items), object()
    while (item := await asyncio.to_thread(next, iterator, end)) is not end:
        yield cast(T, item)


async def _forward(items: AsyncGenerator[T, None], put: Any) -> None:
    async with aclosing(items):
        async for item in items:
            put(item)


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
