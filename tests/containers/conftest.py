"""One engine for the whole run, with each image that a test needs. At its end all of it is gone, also after Ctrl-C."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from tests.containers import images
from tests.containers.engine import Engine, ProvisionError, engine
from tests.containers.project import Project


def interrupt(signum: int, frame: FrameType | None) -> None:
    """`timeout` and CI end a run by SIGTERM, after which pytest would not clean up. One that follows is ignored."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


signal.signal(signal.SIGTERM, interrupt)


@pytest.fixture(scope="session")
def docker() -> Iterator[Engine]:
    """With the images that every test needs. Where these cannot be had, all tests are skipped with the reason."""
    with contextlib.ExitStack() as stack:
        try:
            running = stack.enter_context(engine())
            images.provide(running, images.CPU, images.ENVOY)
        except ProvisionError as error:
            pytest.skip(str(error))
        yield running


@pytest.fixture(scope="module")
def project(docker: Engine) -> Iterator[Callable[..., Project]]:
    """`project(file, ..., SETTING=value)`; taken down at the end of the module or when the next one is asked for."""
    with contextlib.ExitStack() as current:

        def make(*files: str, **settings: str) -> Project:
            current.close()
            made = Project(docker, *files, **settings)
            current.callback(made.down)
            return made

        yield make
