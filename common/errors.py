"""Errors that reach a caller.

    ValueError           the caller's mistake; the message names the value       INVALID_ARG   HTTP 400
    UnavailableError     a full queue, a dead engine, an LLM that does not answer UNAVAILABLE   HTTP 503
    CancelledError       asyncio's: the caller disconnected                      CANCELLED
    anything else        a bug of ours                                           INTERNAL      HTTP 500

`triton_io` maps them to Triton error codes, once, at the boundary of each request.
"""


class LostAnswerError(RuntimeError):
    """Another model answered without outputs: Triton's response cache stores a failure as an empty success."""


class UnavailableError(RuntimeError):
    """The service cannot do this now, although the request may be valid: full, timed out, or a part of it is down."""


# Prefixes of a model's error messages. A call between models loses the error code (Triton 2.51 makes all of them
# INTERNAL), and so does a stream to a client, so callers recognize errors by these. Only at the beginning of a message:
# the rest may quote clients and LLM servers.
INVALID = "invalid request: "
UNAVAILABLE = "unavailable: "
