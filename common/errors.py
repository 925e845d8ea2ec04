"""Errors that reach a caller.

    ValueError           the caller's mistake; the message names the value       INVALID_ARG   HTTP 400
    UnavailableError     a full queue, an LLM that does not answer               UNAVAILABLE   HTTP 503
    FatalError           a dead engine or GPU; the process is ended              UNAVAILABLE   HTTP 503
    CancelledError       asyncio's: the caller disconnected                      CANCELLED
    anything else        a bug of ours                                           INTERNAL      HTTP 500

`triton_io` maps them to Triton error codes, once, at the boundary of each request.
"""

import re


class LostAnswerError(RuntimeError):
    """Another model answered without outputs: Triton's response cache stores a failure as an empty success."""


class UnavailableError(RuntimeError):
    """The service cannot do this now, although the request may be valid: full, timed out, or a part of it is down."""


class FatalError(UnavailableError):
    """This process cannot serve any request from now on: its engine is dead. It has to be restarted."""


class ModelCallError(RuntimeError):
    """Another model failed, and the message is its own."""


# After these errors every call of CUDA fails until the process ends (CUDA Runtime API, "Data types", cudaError: "any
# further CUDA work will return the same error"). Out of memory is not among them.
_STICKY = re.compile(
    r"illegal memory access|illegal instruction|misaligned address|unspecified launch failure|launch timed out"
    r"|device-side assert|invalid program counter|invalid address space|hardware stack error"
    r"|uncorrectable (ECC|NVLink) error|CUDA (error|failure)[^:]*: unknown error"
    r"|(CUBLAS|CUDNN)_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)",
    re.IGNORECASE,
)


def is_fatal(error: BaseException) -> bool:
    """Whether no later request can succeed in this process."""
    if isinstance(error, (UnavailableError, ModelCallError, ValueError)):  # its text may be another process's
        return isinstance(error, FatalError)
    return isinstance(error, Exception) and bool(_STICKY.search(str(error)))


# Prefixes of a model's error messages. A call between models loses the error code (Triton 2.51 makes all of them
# INTERNAL), and so does a stream to a client, so callers recognize errors by these. Only at the beginning of a message:
# the rest may quote clients and LLM servers.
INVALID = "invalid request: "
UNAVAILABLE = "unavailable: "
