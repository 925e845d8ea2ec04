"""The application: routes, middleware and error handlers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute
from starlette.staticfiles import StaticFiles

from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.speech_service import openapi as doc
from cosyvoice_triton.speech_service.audio.recordings import warm_up
from cosyvoice_triton.speech_service.dispatcher import Dispatcher
from cosyvoice_triton.speech_service.errors import ApiError, invalid
from cosyvoice_triton.speech_service.metrics import Metrics
from cosyvoice_triton.speech_service.routes import (
    conversion,
    realtime,
    runtime_grpc,
    runtime_http,
    socket,
    speech,
    triton_http,
    voices,
)
from cosyvoice_triton.speech_service.routes.responses import USAGE_HEADERS
from cosyvoice_triton.speech_service.security.budget import ByteBudget
from cosyvoice_triton.speech_service.security.guard import Guard, check_key
from cosyvoice_triton.speech_service.service import Service
from cosyvoice_triton.speech_service.settings import Settings
from cosyvoice_triton.speech_service.triton import TritonPool
from cosyvoice_triton.speech_service.voices import VoiceFolder

ROUTES = (speech, conversion, voices, socket, realtime, runtime_http, triton_http)
SPOKEN = frozenset((*speech.PATHS, conversion.PATH, *runtime_http.ROUTES))  # routes of one request, one voice
PAGE = Path(__file__).parent / "page"
# The page loads only its own files.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; media-src 'self' blob:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def build(settings: Settings) -> FastAPI:
    """Return the application, which holds its connections while it runs."""
    metrics = Metrics()
    folder = VoiceFolder(settings.voices_dir, settings.max_reference_bytes, settings.voice_aliases, settings.max_voices)

    @contextlib.asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        async with TritonPool.of(settings.urls) as pool:
            with contextlib.closing(Dispatcher(pool, settings, metrics)) as dispatcher:
                app.state.service = service = Service(settings, folder, metrics, dispatcher)
                await asyncio.to_thread(warm_up)
                async with runtime_grpc.serving(service):
                    yield

    async def admit() -> None:
        await app.state.service.dispatcher.admit()

    # Without FastAPI's documentation pages, which load scripts from other hosts.
    # Nor redirections, whose address would be that of the Host header.
    app = FastAPI(openapi_url=None, lifespan=running, redirect_slashes=False)
    for module in ROUTES:
        app.include_router(module.router)
    app.mount("/static", StaticFiles(directory=PAGE), name="static")
    _add_service_routes(app, settings)
    doc.require_limits(routes_of(app))
    _add_errors(app)
    app.state.budget = ByteBudget(settings.max_unanswered_bytes)
    app.add_middleware(Guard, settings=settings, metrics=metrics, budget=app.state.budget, spoken=SPOKEN, admit=admit)
    if settings.cors_origins:  # outside the guard, because preflight requests have no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # SDKs send many of their own, and an allowed site may send any
            allow_private_network=True,
            expose_headers=["x-sample-rate", "x-speech-warning", "x-request-id", "retry-after", *USAGE_HEADERS],
        )
    return app


def routes_of(app: FastAPI) -> list[BaseRoute]:
    """Return all routes, also those of the modules."""
    return [*(route for module in ROUTES for route in module.router.routes), *app.routes]


def _add_service_routes(app: FastAPI, settings: Settings) -> None:
    page_route = doc.describe("Service", content={"text/html": doc.TEXT})
    tritons = doc.array(doc.record({"address": doc.TEXT, "models": doc.array(doc.TEXT)}))

    @app.get("/", **page_route)
    async def page() -> Response:
        """Return the page, to speak texts and to record voices."""
        return FileResponse(PAGE / "index.html", headers=_PAGE_HEADERS)

    @app.get("/docs", **page_route)
    async def docs() -> Response:
        """Return the document of `/openapi.json` as a page."""
        return FileResponse(PAGE / "docs.html", headers=_PAGE_HEADERS)

    # Built once: that holds the event loop for 20 ms, and anyone may ask for it.
    described = cache(lambda: doc.document(routes_of(app), settings))

    @app.get("/openapi.json", **doc.describe("Service", answer={"type": "object"}))
    async def openapi() -> dict[str, Any]:
        """Return this document."""
        return described()

    @app.get("/health", **doc.describe("Service", answer=doc.record({"status": doc.TEXT}, {"tritons": tritons})))
    async def health(request: Request) -> Response:
        """Return 200 if at least one Triton serves a speech model. Their addresses are for callers with a key."""
        service = Service.of(request)
        pool = service.dispatcher.pool
        about: dict[str, Any] = {"status": "ok" if pool.models else "unavailable"}
        with contextlib.suppress(ApiError):
            check_key(request.headers.get("authorization", ""), service.settings.api_keys)
            about["tritons"] = [{"address": each.url, "models": sorted(each.models)} for each in pool.backends]
        return JSONResponse(about, 200 if pool.models else 503)

    @app.get("/metrics", **doc.describe("Service", content={"text/plain": doc.TEXT}))
    async def metrics(request: Request) -> Response:
        """Return metrics in the format of Prometheus."""
        service = Service.of(request)
        for backend in service.dispatcher.pool.backends:
            service.metrics.outstanding.labels(backend.url).set(backend.outstanding)
            service.metrics.ready.labels(backend.url).set(bool(backend.models))
        return Response(service.metrics.page(), media_type=service.metrics.content_type)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        return error.response

    @app.exception_handler(RequestValidationError)
    async def wrong_parameter(request: Request, error: RequestValidationError) -> Response:
        found = error.errors()[0]
        return invalid(f"{found['loc'][-1]}: {found['msg']}", str(found["loc"][-1])).response

    @app.exception_handler(UnavailableError)
    async def unavailable(request: Request, error: UnavailableError) -> Response:
        return ApiError(503, str(error), code="unavailable", retry_after=1).response

    @app.exception_handler(HTTPException)
    async def framework_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 405 and request.method == "OPTIONS":  # not a preflight request: those have an origin
            return Response(status_code=204, headers=error.headers)
        messages = {
            404: f"{request.url.path} does not exist",
            405: f"{request.url.path} does not support {request.method}",
        }
        answer = ApiError(error.status_code, messages.get(error.status_code, str(error.detail))).response
        answer.headers.update(error.headers or {})  # of a 405: `Allow`
        return answer

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        # uvicorn logs it.
        return ApiError(500, "internal error; see the log of the service").response
