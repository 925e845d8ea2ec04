"""Before every route: checks of size, origin and API key. After it: metrics of the outcome.

Plain ASGI, because Starlette's middleware base class would relay every streamed answer.
"""

import contextlib
import hashlib
import logging
import secrets
import uuid
from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cosyvoice_triton.monitoring import tracing
from cosyvoice_triton.speech_service.errors import ApiError
from cosyvoice_triton.speech_service.metrics import Metrics
from cosyvoice_triton.speech_service.security.budget import FREE_BYTES, ByteBudget, Claim
from cosyvoice_triton.speech_service.settings import Settings

# Paths that need no key: the page, the API's documentation, and what monitoring reads.
OPEN_PATHS = ("/", "/docs", "/openapi.json", "/health", "/metrics", "/static", "/favicon.ico")
# OpenAI's subprotocol for pages, which cannot give a WebSocket headers: the key follows.
KEY_PROTOCOL = "openai-insecure-api-key."

# Id of the request that a task works for, part of every log line; clients get it as x-request-id.
REQUEST_ID: ContextVar[str] = ContextVar("request", default="-")
# Name of the API key of the request that a task works for; "" if the service has no keys.
API_KEY: ContextVar[str] = ContextVar("key", default="")


class RequestIdFilter(logging.Filter):
    """Adds the attribute `request` to each log record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request = REQUEST_ID.get()
        return True


@dataclass(eq=False)
class Guard:
    """ASGI middleware around the application. `admit` raises ApiError for a request to one of the paths `spoken` that
    would be refused: before its route is looked up, and before its body."""

    app: ASGIApp
    settings: Settings
    metrics: Metrics
    budget: ByteBudget
    spoken: Collection[str]
    admit: Callable[[], Awaitable[None]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        status, name, claim = "gone", uuid.uuid4().hex[:16], Claim(self.budget)
        REQUEST_ID.set(name)
        limited = _LimitedReceive(receive, self.settings.max_body_bytes, claim)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                claim.release()  # its body has been decoded
                status = str(message["status"])
                # A client that is answered early need not send the rest.
                close = [] if limited.complete or not _has_large_body(scope) else [(b"connection", b"close")]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", name.encode()), *close]}
            elif message["type"] == "websocket.accept":
                status = "101"
            await send(message)

        try:
            try:
                self._check(scope)
                if scope["path"] in self.spoken:
                    await self.admit()
            except ApiError as error:
                await self._reject(error, scope, receive, watched)
                return
            if scope.get("method") == "HEAD" and not scope["path"].startswith("/inference_"):  # which would speak
                scope = {**scope, "method": "GET"}  # uvicorn drops the body
            with _span(scope):
                await self.app(scope, limited, watched)
        except ClientDisconnect:  # while its request was read
            status = "gone"
        except BaseException:  # also CancelledError, as at the end of the drain: the client is still there
            status = "500" if status == "gone" else "aborted"
            raise
        finally:
            claim.release()
            route = scope["path"] if scope["path"] in self.spoken else getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(route, scope.get("speech.outcome", status)).inc()

    async def _reject(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()  # the connect message
        await error.response(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if len(headers.getlist("host")) != 1 and scope["http_version"] != "1.0":
            raise ApiError(400, "a request has one Host header", code="host")
        self._check_host(headers.get("host", ""))
        self._check_origin(headers, scope.get("method", "websocket"))
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self.settings.max_body_bytes:
            raise too_large(self.settings.max_body_bytes)
        if not is_open(scope["path"]):
            API_KEY.set(check_key(headers.get("authorization") or _protocol_key(scope), self.settings.api_keys))

    def _check_host(self, host: str) -> None:
        """Reject a name that is not ours: a page of that name, which its owner points at this machine (DNS rebinding),
        would be of the same origin. Nobody else decides to what an IP address or localhost leads."""
        allowed = self.settings.allowed_hosts
        if host and "*" not in allowed and not _is_allowed(host, allowed):
            raise ApiError(
                403,
                f"requests to {host!r} are refused: set SPEECH_ALLOWED_HOSTS in the service's environment",
                code="host",
            )

    def _check_origin(self, headers: Headers, method: str) -> None:
        """Reject requests that a page of another site sends through a user's browser.

        Browsers send a preflight request only if the request has a JSON body, and never for a WebSocket.
        """
        origin = headers.get("origin")
        if origin is None or method in ("GET", "HEAD", "OPTIONS"):
            return
        allowed = self.settings.cors_origins
        own = origin.partition("://")[2] == headers.get("host")
        if not own and "*" not in allowed and origin not in allowed:
            raise ApiError(
                403,
                f"pages of {origin} may not use this service: allow them with SPEECH_CORS_ORIGINS={origin} in the "
                "environment of `serve` or `speech`",
                code="origin",
            )


def _has_large_body(scope: Scope) -> bool:
    """Return whether a request may have more to send than is read in a moment. Who asks whether to send it at all may
    send another request instead."""
    headers = Headers(scope=scope)
    length = headers.get("content-length", "")
    return "expect" in headers or "transfer-encoding" in headers or length.isdigit() and int(length) > FREE_BYTES


def _span(scope: Scope) -> tracing.Span:
    speaks = scope.get("method", "POST") == "POST" or scope["path"].startswith("/inference_")  # WebSockets have none
    if not speaks:
        return tracing.OFF
    return tracing.span("speech service", Headers(scope=scope).get(tracing.TRACEPARENT, ""))


def is_open(path: str) -> bool:
    """Return whether requests to `path` need no key."""
    return any(path == each or path.startswith(f"{each}/") and each != "/" for each in OPEN_PATHS)


def _is_allowed(host: str, allowed: Collection[str]) -> bool:
    """Return whether a Host header has an IP address or one of the names, of which *.NAME stands for all below NAME."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    with contextlib.suppress(ValueError):
        return bool(ip_address(name))
    return any(name.endswith(each[1:].lower()) if each.startswith("*.") else name == each.lower() for each in allowed)


def _protocol_key(scope: Scope) -> str:
    """Return the key among a WebSocket's subprotocols as an Authorization header has it, empty without one."""
    keys = [each for each in scope.get("subprotocols", ()) if each.startswith(KEY_PROTOCOL)]
    return f"Bearer {keys[0].removeprefix(KEY_PROTOCOL)}" if keys else ""


def check_key(authorization: str, keys: Collection[str]) -> str:
    """Return the name of the key if `authorization` is "Bearer KEY" with one of `keys`, "" if `keys` is empty.
    ApiError 401 otherwise."""
    scheme, _, given = authorization.strip().partition(" ")
    given = given.strip() if scheme.lower() == "bearer" else ""
    known = [key for key in keys if secrets.compare_digest(given.encode(), key.encode())]
    if keys and not known:
        raise ApiError(
            401, "the API key is missing or unknown: send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
        )
    return key_name(known[0]) if known else ""


@cache
def key_name(key: str) -> str:
    """Return a key's name: eight digits that stay the same and do not tell the key. Metrics and voices have it.

    Everyone may read the metrics, so the hash is slow: each guess of a key costs milliseconds.
    """
    return hashlib.pbkdf2_hmac("sha256", key.encode(), b"cosyvoice-triton", 20_000).hex()[:8]


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes", code="body_too_large")


class _LimitedReceive:
    """`receive` that raises once a body without content-length exceeds `limit` bytes, or all bodies their budget."""

    def __init__(self, receive: Receive, limit: int, claim: Claim) -> None:
        self._receive = receive
        self._limit = limit
        self._claim = claim
        self._received = 0
        self.complete = False

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
            if self._received > self._limit:
                raise too_large(self._limit)
            if not self._claim.covers(self._received):
                raise ApiError(503, "too many large bodies arrive at once", code="unavailable", retry_after=1)
        return message
