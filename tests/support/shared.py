"""Files that the worker processes of one test run share."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The directory `name` of this test run. The first worker runs `make(directory)`; the others wait for it.

    Nothing may be changed in it: other workers read it.
    """
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has its own directory in that of the run
        root = root.parent
    directory = root / name
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            unfinished = root / f"{name}.unfinished"
            make(unfinished)
            unfinished.rename(directory)
    return directory
