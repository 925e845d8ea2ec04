"""An engine's thread that ends for whatever reason: nobody waits for it, and it is reported."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from cosyvoice_triton.errors import FatalError
from cosyvoice_triton.llm.engines.interface import GenerationRequest
from cosyvoice_triton.llm.engines.threaded_engine import Generation, OnTokens, ThreadedEngine
from cosyvoice_triton.llm.interface import Sampling
from cosyvoice_triton.monitoring.environment import METRICS_DIRECTORY
from cosyvoice_triton.monitoring.health import Health, reported_failures
from cosyvoice_triton.profiles import H200


class Ending(ThreadedEngine[Generation]):
    """Ends at its first step."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__(4, [], H200.llm)
        self._reason = reason

    def _accept(self, request: GenerationRequest, on_tokens: OnTokens) -> Generation:
        return Generation(request, on_tokens)

    def step(self) -> float:
        raise self._reason


class Odd(BaseException):
    pass


@pytest.mark.parametrize("reason", [RuntimeError("a bug"), SystemExit(3), KeyboardInterrupt(), Odd("odd")])
def test_whatever_ends_the_thread_answers_all_requests_and_is_reported(
    reason: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(METRICS_DIRECTORY, str(tmp_path))
    engine = Ending(reason)
    engine.start()
    request = GenerationRequest(np.zeros(1, np.int64), Sampling(), (1,))

    async def ask() -> None:
        async for _ in engine.generate(request):
            pass

    for _ in range(2):  # the one that was being served, and a later one
        with pytest.raises(FatalError, match=type(reason).__name__):
            asyncio.run(asyncio.wait_for(ask(), 10))
    assert "the LLM engine failed" in caplog.text
    health = Health()
    health.suspect()
    health.test_if_due(lambda: asyncio.run(ask()), "tensorrt_llm")
    assert type(reason).__name__ in reported_failures(tmp_path)["tensorrt_llm"]
    engine.close()
