"""docker-compose.dit.yml on the image `gpu`, with LLM=vllm and a stand-in of vLLM's image: started in order, asked."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from tests.containers.project import Project, moment, wait_for


def first_healthy(container: dict[str, Any]) -> datetime:
    """The end of the health check that made it healthy."""
    found = next(check for check in container["State"]["Health"]["Log"] if check["ExitCode"] == 0)
    return datetime.fromisoformat(found["End"][:26])


@pytest.mark.extended
def test_the_llm_is_healthy_before_triton_starts(project: Callable[..., Project]) -> None:
    started = project("docker-compose.dit.yml", "tests/containers/no_gpu.yml", LLM="vllm")
    started.up("tts", "gateway")
    assert not started.exists("engine")
    server, tts = started.container("llm"), started.container("tts")
    assert moment(started.container("download"), "FinishedAt") <= moment(server, "StartedAt")
    assert first_healthy(server) <= moment(tts, "StartedAt")
    wait_for("dit on the image gpu with vllm", lambda: started.servers() == 1)
    answer = started.spoken("cosyvoice2_dit")
    assert not answer.error and answer.samples > 10_000
