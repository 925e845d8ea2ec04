"""docker-compose.dit.yml on the image `gpu`, whose engine of the LLM computes on the CPU, too."""

from collections.abc import Callable

import pytest

from tests.containers.project import Project, wait_for


@pytest.mark.extended
def test_the_image_for_gpus_serves_what_it_serves_without_settings(project: Callable[..., Project]) -> None:
    started = project("docker-compose.dit.yml", "tests/containers/no_gpu.yml")
    started.up("tts", "gateway")
    assert not started.exists("engine") and not started.exists("llm")
    wait_for("dit on the image gpu", lambda: started.servers() == 1)
    answer = started.spoken("cosyvoice2_dit")
    assert not answer.error and answer.samples > 10_000
