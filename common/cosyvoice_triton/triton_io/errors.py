"""Errors across the boundary of a model: exceptions to error responses, and error responses of other models back.

ValueError        <-> INVALID_ARG      the caller's mistake
UnavailableError  <-> UNAVAILABLE      full, timed out, out of memory, or a part of the service is down
fatal errors       -> UNAVAILABLE      this process is reported and ended: another server can serve the request
CancelledError     -> CANCELLED        the client disconnected
anything else      -> INTERNAL         a bug, logged with its traceback
"""

import asyncio
import logging
import re
from typing import Any

import torch
import triton_python_backend_utils as pb_utils  # noqa: TID251

from cosyvoice_triton import errors
from cosyvoice_triton.monitoring.health import health, report_failure

logger = logging.getLogger(__name__)

# Triton's messages if a model's process has died, or if the server is shutting down and refuses calls between models.
MODEL_DOWN = re.compile(
    r"(Model \S+ - Error when running inference: )?(Stub process '\S+' is not healthy|Server not ready)"
)
MAX_MESSAGE_CHARS = 500  # gRPC carries errors in escaped headers, of which a client takes 8 kB


def error_response(error: BaseException, model: str) -> Any:
    """Return the error response for `error`. Logs all but a caller's mistake, and has the model tested after a bug."""
    if isinstance(error, (RuntimeError, pb_utils.TritonModelException)) and errors.SHARED_MEMORY.search(str(error)):
        logger.warning("%s: %s", model, error)
        error = errors.UnavailableError(errors.NO_SHARED_MEMORY)
    code, message = pb_utils.TritonError.INTERNAL, f"{model}: {type(error).__name__}: {error}"
    if isinstance(error, ValueError):
        code, message = pb_utils.TritonError.INVALID_ARG, f"{errors.INVALID}{error}"
    elif errors.is_fatal(error):
        code, message = (
            pb_utils.TritonError.UNAVAILABLE,
            f"{errors.UNAVAILABLE}{model} has failed and is restarted: {error}",
        )
        report_failure(model, error)
    elif isinstance(error, (errors.UnavailableError, MemoryError, torch.OutOfMemoryError)):
        code, message = pb_utils.TritonError.UNAVAILABLE, errors.unavailable_message(error)
        level = logging.INFO if isinstance(error, errors.OverloadedError) else logging.WARNING  # thousands under load
        logger.log(level, "%s: %s", model, error)
    elif isinstance(error, asyncio.CancelledError):
        code, message = pb_utils.TritonError.CANCELLED, "the request was cancelled"
    else:
        logger.error("%s failed", model, exc_info=error)
        health.suspect()
    if len(message) > MAX_MESSAGE_CHARS:
        message = f"{message[:MAX_MESSAGE_CHARS]}... ({len(message)} characters)"
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))


def exception_of(model: str, message: str, code: Any = None) -> Exception:
    """Return the exception that an error of `model` stands for, from its message and, if Triton passes it, its code."""
    if code == pb_utils.TritonError.INVALID_ARG or message.startswith(errors.INVALID):
        return ValueError(f"{model}: {message.removeprefix(errors.INVALID)}")
    if MODEL_DOWN.match(message):
        return errors.ModelDownError(f"{model}: {message}")
    if code == pb_utils.TritonError.UNAVAILABLE or message.startswith(errors.UNAVAILABLE):
        return errors.unavailable_error(message, f"{model}: ")
    return errors.ModelCallError(f"{model}: {message}")
