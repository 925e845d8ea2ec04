"""Before every route: its size, its sender, its key. After it: what became of it, for the figures.

Plain ASGI, since a middleware of Starlette's own would stand between a streamed answer and its client.
"""

import logging
import secrets
import uuid
from collections.abc import Iterable
from contextvars import ContextVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.speech_service.errors import ApiError
from common.speech_service.metrics import Metrics
from common.speech_service.responses import error_response
from common.speech_service.settings import Settings

# What needs no key: the page itself, and what machines look at.
OPEN_PATHS = ("/", "/health", "/metrics", "/static", "/favicon.ico")
_POLICY_VIOLATION = 1008


# Of the request that a task works for, so that every line of the log can name it; clients get it as x-request-id.
REQUEST_ID: ContextVar[str] = ContextVar("request", default="-")


class NamesRequest(logging.Filter):
    """Gives each record the attribute `request`."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request = REQUEST_ID.get()
        return True


class Guard:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        status, name = "gone", uuid.uuid4().hex[:16]
        REQUEST_ID.set(name)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                message = {**message, "headers": [*message["headers"], (b"x-request-id", name.encode())]}
            elif message["type"] == "websocket.accept":
                status = "101"
            await send(message)

        try:
            try:
                self._check(scope)
            except ApiError as error:
                await self._refuse(error, scope, receive, watched)
                return
            await self._app(scope, _Limited(receive, self._settings.max_body_bytes), watched)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, scope.get("speech.outcome", status)).inc()

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()  # its opening
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": error.message})
        else:
            await error_response(error)(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self._check_origin(headers, scope.get("method", "websocket"))
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._settings.max_body_bytes:
            raise too_large(self._settings.max_body_bytes)
        path = scope["path"]
        if not any(path == one or path.startswith(f"{one}/") and one != "/" for one in OPEN_PATHS):
            check_key(headers.get("authorization", ""), self._settings.api_keys)

    def _check_origin(self, headers: Headers, method: str) -> None:
        """A page of another site must not speak, or add voices, through the browser of somebody who may.

        Browsers ask before they send such a request only where it has a JSON body, and never before a WebSocket.
        """
        origin = headers.get("origin")
        if origin is None or method in ("GET", "HEAD", "OPTIONS"):
            return
        allowed = self._settings.cors_origins
        if urlsplit(origin).netloc != headers.get("host") and "*" not in allowed and origin not in allowed:
            raise ApiError(
                403, f"pages of {origin} may not use this service: allow it by --cors_origins", code="origin"
            )


def check_key(authorization: str, keys: Iterable[str]) -> None:
    """ApiError 401 unless `authorization` is "Bearer KEY" with one of `keys`, or there are none."""
    keys = tuple(keys)
    scheme, _, given = authorization.partition(" ")
    if keys and not any(
        scheme.lower() == "bearer" and secrets.compare_digest(given.encode(), key.encode()) for key in keys
    ):
        raise ApiError(
            401, "the API key is missing or unknown: send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
        )


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes", code="body_too_large")


class _Limited:
    """`receive` that gives no more than `limit` bytes of a body whose length nobody announced."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._left = limit

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise too_large(self._limit)
        return message
