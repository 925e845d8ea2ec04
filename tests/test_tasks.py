import asyncio

import pytest
from cosyvoice_triton.tasks import TaskScope

from tests.support.pipeline import settle


async def value(number: int) -> int:
    await asyncio.sleep(0)
    return number


async def fail(message: str) -> None:
    await asyncio.sleep(0)
    raise RuntimeError(message)


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)  # cleaning up may take turns of the loop too
        ended.append("forever")


async def test_result_returns_the_result_of_new_work_and_of_a_running_task() -> None:
    async with TaskScope() as scope:
        early = scope.spawn(value(1))
        assert [await scope.result(value(2)), await scope.result(early)] == [2, 1]


async def test_waiting_ends_with_the_error_of_another_task_that_fails() -> None:
    ended: list[str] = []
    with pytest.raises(RuntimeError, match="failed"):
        async with TaskScope() as scope:
            scope.spawn(fail("failed"))
            await scope.result(forever(ended))
    assert ended == ["forever"]


@pytest.mark.parametrize("cancelled", [False, True])
async def test_leaving_the_block_and_cancelling_its_owner_wait_until_its_tasks_have_cleaned_up(cancelled: bool) -> None:
    ended: list[str] = []

    async def owner() -> None:
        async with TaskScope() as scope:
            task = scope.spawn(forever(ended))
            await asyncio.sleep(0)
            if cancelled:
                await scope.result(task)

    before = asyncio.all_tasks()
    task = asyncio.create_task(owner())
    await settle()
    if cancelled:
        task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() == cancelled and ended == ["forever"]
    assert asyncio.all_tasks() == before
