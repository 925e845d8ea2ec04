"""The orchestrator of every stack as the Triton model that clients call."""

import asyncio
from typing import Any

import torch

from cosyvoice_triton import triton_io
from cosyvoice_triton.config import OrchestratorConfig
from cosyvoice_triton.monitoring.health import ModelMonitor
from cosyvoice_triton.orchestrator.orchestrator import Orchestrator
from cosyvoice_triton.stacks import Stack

CLOSE_SECONDS = 5.0
TEST_SECONDS = 10.0  # a loop that takes longer for nothing is blocked


class OrchestratorModel:
    """Base class of the orchestrators' `TritonPythonModel`: each request is a task of one asyncio loop."""

    stack: Stack  # set by each model.py

    def initialize(self, args: dict[str, str]) -> None:
        config = OrchestratorConfig.from_triton(args)
        torch.set_num_threads(1)  # it only computes mels of recordings
        self._orchestrator = Orchestrator(config, self.stack)
        self._loop = triton_io.RequestLoop(
            self._orchestrator.answer, model=args["model_name"], decoupled=config.decoupled
        )
        self._monitor = ModelMonitor(args, test=self._test, read=self._orchestrator.stats.values)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._loop.submit(request)

    def _test(self) -> None:
        self._loop.run(asyncio.sleep(0), TEST_SECONDS)

    def finalize(self) -> None:
        try:
            self._loop.end_requests()  # before the connections that they use are closed
            self._loop.run(self._orchestrator.aclose(), CLOSE_SECONDS)
        finally:
            self._loop.close()
            self._monitor.close()
