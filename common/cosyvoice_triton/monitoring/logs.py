"""The log of a model's process: lines like Triton's own, with the model and the request that they are about."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from cosyvoice_triton.monitoring.environment import METRICS_DIRECTORY, log_level, path_of

request_id: ContextVar[str] = ContextVar("request_id", default="")  # of the request that this task or thread serves

starts = logging.getLogger(f"{__name__}.starts")
starts.setLevel(logging.INFO)  # the models log warnings otherwise, and these at every start

FORMAT = "%(levelname).1s%(asctime)s.%(msecs)03d000 %(process)d %(name)s] %(request)s%(message)s"


def configure() -> None:
    """Log in this format, if a process reads it."""
    if path_of(METRICS_DIRECTORY) is None:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT, "%m%d %H:%M:%S"))
    handler.addFilter(_add_request)
    logging.basicConfig(handlers=[handler], level=log_level())


@contextmanager
def timed(stage: str) -> Iterator[None]:
    """Log how long the block, a stage of a model's start, takes."""
    begun = time.monotonic()
    yield
    starts.info("%s: %.1f s", stage, time.monotonic() - begun)


def _add_request(record: logging.LogRecord) -> bool:
    # Quoted, because clients choose it: it must not begin a line of its own.
    record.request = f"[{request!r}] " if (request := request_id.get()) else ""
    return True
