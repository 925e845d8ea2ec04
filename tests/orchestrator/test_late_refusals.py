"""A refusal that comes after its caller has gone is nobody's bug, and none is logged."""

import asyncio
import gc
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton.errors import OverloadedError
from cosyvoice_triton.orchestrator.ports import TritonToken2Wav


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_place_that_is_refused_after_the_caller_has_gone_is_not_logged(replicas: int) -> None:
    async def run() -> list[Any]:
        logged: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
        asked, refused = asyncio.Event(), asyncio.Event()

        async def call(*args: Any, **flags: Any) -> dict[str, np.ndarray]:
            asked.set()
            await refused.wait()
            raise OverloadedError("9 listeners", 1.0)

        names = [f"token2wav_{number}" for number in range(replicas)]
        stream = TritonToken2Wav(call, names, cumulative=False, first_speech_id=0).open()
        reserving = asyncio.ensure_future(stream.reserve())
        await asked.wait()
        reserving.cancel()
        await asyncio.wait({reserving})
        refused.set()
        for _ in range(5):
            await asyncio.sleep(0)
        del stream, reserving
        gc.collect()
        await asyncio.sleep(0)
        return logged

    assert asyncio.run(run()) == []
