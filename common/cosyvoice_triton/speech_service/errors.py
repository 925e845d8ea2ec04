"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}} and an HTTP status."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import grpc
from starlette.responses import JSONResponse

from cosyvoice_triton import errors
from cosyvoice_triton.config import SamplingPreset

# A body's fields, and the models' names for them in their messages.
SAMPLING = ("seed", "sampling", *SamplingPreset._fields, "max_tokens")  # request parameters of the same names

_INPUTS = {
    "target_text": "input",
    "instruct_text": "instructions",
    "reference_text": "ref_text",
    "reference_wav": "ref_audio",
    "source_wav": "audio",
    "nor a speaker": "nor a voice",
}
_FIELDS = (
    *_INPUTS.values(),
    *SAMPLING,
    "voice",
    "speed",
    "duration",
    "language",
    "pronunciation",
    "trim_reference",
    "trim_silence",
    "retry_bad_answers",
)
_INPUT = re.compile(rf"\b({'|'.join(_INPUTS)})\b")
_BEGINS_WITH = {"request parameter ": "", "unknown speaker ": "voice ", "speaker ": "voice ", "no voice": "voice"}

_ERRORS = {  # HTTP status and code
    str(grpc.StatusCode.INVALID_ARGUMENT): (400, None),
    str(grpc.StatusCode.NOT_FOUND): (404, None),
    str(grpc.StatusCode.UNAVAILABLE): (503, "unavailable"),
    # gRPC's own limits, such as the size of a message: not a refusal of the model, which has a text of its own.
    str(grpc.StatusCode.RESOURCE_EXHAUSTED): (503, "unavailable"),
    str(grpc.StatusCode.DEADLINE_EXCEEDED): (504, "timeout"),
}


# Triton's words for a model that it does not serve at the moment: it starts, stops or reloads. (Requests name only
# models that it reported as ready.)
_NOT_SERVED = ("Request for unknown model", "Server is stopping")
# gRPC's words for a connection that is gone, with addresses, which are not for callers.
_LOST = re.compile(
    r"Stream removed|recvmsg:|sendmsg:|Socket closed|Connection (reset|refused)|failed to connect|GOAWAY"
)

NOTHING = "nothing_to_speak"
OVERLOADED = "overloaded"  # code of the refusal of a Triton that has as many listeners as it can serve
# Messages quote what clients send, which may be megabytes.
MESSAGE_CHARS, PARAM_CHARS = 1000, 100


class ApiError(Exception):
    """An answer with status `status`. `param`: the invalid field. `retry_after`: seconds, 0 if retrying is futile."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MESSAGE_CHARS else message[:MESSAGE_CHARS] + "..."
        self.code = code
        self.param = param and param[:PARAM_CHARS]
        self.retry_after = retry_after

    @property
    def kind(self) -> str:
        """Return OpenAI's `type`."""
        names = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        return names.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"  # RFC 9110, 11.6.1: required
        return JSONResponse(self.body, self.status, headers)


def invalid(message: object, param: str | None = None, code: str | None = None) -> ApiError:
    """Return an error of the client: status 400."""
    return ApiError(400, str(message), code=code, param=param)


@contextlib.contextmanager
def naming(field: str | None) -> Iterator[None]:
    """Turn a ValueError of the block into an error of the client that names the field."""
    try:
        yield
    except ValueError as error:
        raise invalid(error, field) from None


def from_triton(status: str | None, message: str | None, timeout: float = 0.0) -> ApiError:
    """Return the error for a failed call to a model; `status` and `message` are those of gRPC. timeout: in seconds.

    Errors of a stream have no status. (Triton 2.51 can send one if a header asks for it, but then sometimes crashes.)
    """
    text = " ".join((message or "the model gave no reason").split())
    if text.startswith(errors.INVALID):
        message, field = named(text.removeprefix(errors.INVALID))
        return invalid(message, field, NOTHING if message.startswith("input has nothing to speak") else None)
    if text.startswith(errors.UNAVAILABLE):
        error = errors.unavailable_error(text)
        if isinstance(error, errors.OverloadedError):
            return ApiError(429, str(error), code=OVERLOADED, retry_after=round(error.retry_after))
        status, text = str(grpc.StatusCode.UNAVAILABLE), text.removeprefix(errors.UNAVAILABLE)
    if errors.SHARED_MEMORY.search(text):
        status, text = str(grpc.StatusCode.UNAVAILABLE), errors.NO_SHARED_MEMORY
    if text.startswith(_NOT_SERVED):
        status = str(grpc.StatusCode.UNAVAILABLE)
    if _LOST.search(text):
        status, text = str(grpc.StatusCode.UNAVAILABLE), "the connection to Triton was lost"
    http, code = _ERRORS.get(status or "", (502, "upstream_error"))
    if http == 504:
        text = f"not complete within --timeout of this service, {timeout:g} s; a paced answer takes as long as it plays"
    return ApiError(http, text, code=code, retry_after=1 if http == 503 else 0)


def named(message: str) -> tuple[str, str | None]:
    """Return a model's message about a request in the words of the body, and the field that it begins with, if any."""
    message = _INPUT.sub(lambda found: _INPUTS[found[0]], message)
    about = message
    for words, field in _BEGINS_WITH.items():
        if about.startswith(words):
            about = field + about.removeprefix(words)
    first = about.partition(" ")[0].rstrip(":")
    return message, first if first in _FIELDS else None
