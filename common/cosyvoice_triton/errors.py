"""Errors that reach a caller.

    ValueError           the caller's mistake; the message names the value       INVALID_ARG   HTTP 400
    UnavailableError     a full queue, an LLM that does not answer               UNAVAILABLE   HTTP 503
    OverloadedError      too many listeners: one more would cause gaps           UNAVAILABLE   HTTP 429
    ModelDownError       another model of the server has died or failed         UNAVAILABLE   HTTP 503
    FatalError           a dead engine or GPU; the process is ended              UNAVAILABLE   HTTP 503
    CancelledError       asyncio's: the caller disconnected                      CANCELLED
    anything else        a bug of ours                                           INTERNAL      HTTP 500

`triton_io` maps them to Triton error codes, once, at the boundary of each request.
"""

import math
import re

MAX_RETRY_SECONDS = 30

# Triton's words for a full /dev/shm, with the name of a region, which is not for callers; and ours.
SHARED_MEMORY = re.compile(r"\bshared memory (pool|region)|No space left on device", re.IGNORECASE)
NO_SHARED_MEMORY = "the server has no shared memory left (/dev/shm)"


class LostAnswerError(RuntimeError):
    """Another model answered without outputs: Triton's response cache stores a failure as an empty success."""


class UnavailableError(RuntimeError):
    """The service cannot do this now, although the request may be valid: full, timed out, or a part of it is down."""


class OverloadedError(UnavailableError):
    """Refused, so that those who listen already have no gaps.

    retry_after: seconds after which another try may succeed. reason: which limit, as the metric names it.
    """

    def __init__(self, message: str, retry_after: float, reason: str = "") -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.reason = reason


class FatalError(UnavailableError):
    """This process cannot serve any request from now on: its engine is dead. It has to be restarted."""


class ModelDownError(UnavailableError):
    """The process of another model has died, or has reported that it cannot serve any request."""


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
    """Return whether no later request can succeed in this process."""
    if isinstance(error, (UnavailableError, ModelCallError, ValueError)):  # its text may be another process's
        return isinstance(error, FatalError)
    return isinstance(error, Exception) and bool(_STICKY.search(str(error)))


# Prefixes of a model's error messages. A call between models loses the error code (Triton 2.51 makes all of them
# INTERNAL), and so does a stream to a client, so callers recognize errors by these. Only at the beginning of a message:
# the rest may quote clients and LLM servers.
INVALID = "invalid request: "
UNAVAILABLE = "unavailable: "
_OVERLOADED = re.compile(r"overloaded, retry after (\d+) s: ")


def unavailable_message(error: BaseException) -> str:
    """Return the message of an UnavailableError, from which `unavailable_error` makes it again."""
    if not isinstance(error, OverloadedError):
        return f"{UNAVAILABLE}{error}"
    seconds = min(max(1, math.ceil(error.retry_after)), MAX_RETRY_SECONDS)
    return f"{UNAVAILABLE}overloaded, retry after {seconds} s: {error}"


def is_overloaded(message: str) -> bool:
    """Return whether a message quotes that of an OverloadedError."""
    return bool(re.search(f"{UNAVAILABLE}{_OVERLOADED.pattern}", message))


def unavailable_error(message: str, caller: str = "") -> UnavailableError:
    """Return the error that a message stands for; `caller` goes before its text."""
    text = message.removeprefix(UNAVAILABLE)
    if found := _OVERLOADED.match(text):
        return OverloadedError(f"{caller}{text[found.end() :]}", float(found[1]))
    return UnavailableError(f"{caller}{text}")


def json_kind(value: object) -> str:
    """Return the kind of a JSON value that is not an object, such as "a list" or "null"."""
    if value is None:
        return "null"
    kinds = {list: "a list", str: "a text", bool: "true or false"}
    return kinds.get(type(value), "a number")
