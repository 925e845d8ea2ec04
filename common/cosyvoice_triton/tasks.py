"""asyncio tasks that end with a block."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class TaskScope:
    """`async with TaskScope() as scope`: when the block is left for any reason, its tasks are cancelled and awaited.

    asyncio.TaskGroup cannot be used: it needs Python 3.11, and if a task fails it cancels the task that entered the
    block, which for an async generator is the one that requested the first item.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> "TaskScope":
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` concurrently with the block."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        return task

    async def result(self, work: Coroutine[Any, Any, T] | asyncio.Task[T]) -> T:
        """Return the result of `work`; raises as soon as it or any other task of the scope fails."""
        task = work if isinstance(work, asyncio.Task) else self.spawn(work)
        while not task.done():
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for other in done - {task}:
                self._tasks.discard(other)
                other.result()  # raises its error
        self._tasks.discard(task)
        return task.result()
