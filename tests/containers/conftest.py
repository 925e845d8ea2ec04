"""One engine with all images for the whole run. At its end all of it is gone, also after Ctrl-C."""

import logging
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.containers import images
from tests.containers.engine import Engine, EngineError, engine
from tests.containers.project import Project

log = logging.getLogger("containers")
# `timeout` and CI end a run by SIGTERM, after which pytest would not clean up.
signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def docker() -> Iterator[Engine]:
    try:
        with engine() as running:
            images.bases(running)
            images.cpu(running)
            images.vllm(running)
            for line in running.docker("images", "--format", "{{.Repository}}:{{.Tag}} {{.Size}}").splitlines():
                log.info("image %s", line)
            yield running
    except EngineError as error:
        pytest.exit(f"no Docker engine: {error}", returncode=1)


@pytest.fixture(scope="module")
def project(docker: Engine) -> Iterator[Callable[..., Project]]:
    """`project(file, ..., SETTING=value)`; taken down at the end of the module or when the next one is asked for."""
    current: list[Project] = []

    def make(*files: str, **settings: str) -> Project:
        while current:
            current.pop().down()
        current.append(Project(docker, *files, **settings))
        return current[-1]

    yield make
    while current:
        current.pop().down()
