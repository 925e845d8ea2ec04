"""cosyvoice2: text and a reference recording to speech, through the other models and the vocoder token2wav."""

from typing import Any

from common import triton_io
from common.config import OrchestratorConfig
from common.orchestrator import UNET, Orchestrator

CLOSE_SECONDS = 5.0


class TritonPythonModel:
    """One asyncio loop; each request is a task of it."""

    def initialize(self, args: dict[str, str]) -> None:
        config = OrchestratorConfig.from_triton(args)
        self._orchestrator = Orchestrator(config, UNET)
        self._loop = triton_io.RequestLoop(
            self._orchestrator.answer, model=args["model_name"], decoupled=config.decoupled
        )

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._loop.submit(request)

    def finalize(self) -> None:
        self._loop.run(self._orchestrator.aclose(), CLOSE_SECONDS)
        self._loop.close()
