"""Errors that cross the boundary to a caller.

    ValueError           the caller's mistake; the message names the value       INVALID_ARG   HTTP 400
    UnavailableError     a full queue, a dead engine, an LLM that does not answer UNAVAILABLE   HTTP 503
    CancelledError       asyncio's: the caller went away                         CANCELLED
    anything else        a bug of ours                                           INTERNAL      HTTP 500

`triton_io` maps them to Triton error codes, once, at the boundary of each request.
"""


class LostAnswerError(RuntimeError):
    """Another model's answer came without its outputs: Triton's response cache keeps a failure as an empty success."""


class UnavailableError(RuntimeError):
    """The service cannot do this now, although the request may be fine: full, timed out, or a part of it is down."""


# Words that open a model's message. A call between models loses the code of an error (Triton 2.51 makes every one
# INTERNAL), and so does a stream to a client, so whoever asked tells them by these. Only at the opening: further on
# stands what clients and LLM servers have written.
INVALID = "invalid request: "
UNAVAILABLE = "unavailable: "
