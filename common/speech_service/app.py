"""The application: the routes, what guards them, and what they share."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from common.errors import UnavailableError
from common.speech_service import runtime_grpc, runtime_http, socket_route, speech_routes, voice_routes
from common.speech_service.core import SpeechCore
from common.speech_service.errors import ApiError
from common.speech_service.guard import Guard
from common.speech_service.metrics import Metrics
from common.speech_service.responses import error_response
from common.speech_service.service import Service
from common.speech_service.settings import Settings
from common.speech_service.shelf import Shelf
from common.speech_service.triton import TritonPool

STATIC = Path(__file__).parent / "static"
# The page uses its own files and nobody else's.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; media-src 'self' blob:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def build(settings: Settings, runtime: runtime_grpc.Endpoint | None = None) -> FastAPI:
    """The application, which holds its connections while it runs. runtime: where to serve the plain runtime's gRPC."""
    metrics = Metrics()
    shelf = Shelf(settings.voices_dir, settings.max_reference_bytes)

    @contextlib.asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        async with TritonPool(settings.urls) as pool, SpeechCore(pool, settings, metrics) as core:
            app.state.service = service = Service(settings, shelf, metrics, core)
            async with runtime_grpc.serving(service, runtime):
                yield

    # Without FastAPI's own pages of documentation, which load their scripts from elsewhere.
    app = FastAPI(title="CosyVoice2 speech", version="1", docs_url=None, redoc_url=None, lifespan=running)
    for routes in (speech_routes, voice_routes, socket_route, runtime_http):
        app.include_router(routes.router)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    _add_house_routes(app)
    _add_errors(app)
    app.add_middleware(Guard, settings=settings, metrics=metrics)
    if settings.cors_origins:  # around the guard, since browsers bring no key when they ask whether they may
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type"],
            expose_headers=["x-sample-rate", "retry-after"],
        )
    return app


def _add_house_routes(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html", headers=_PAGE_HEADERS)

    @app.get("/health")
    async def health(request: Request) -> Response:
        """Whether at least one Triton serves a speech model."""
        pool = Service.of(request).core.pool
        tritons = [{"address": one.url, "models": sorted(one.models)} for one in pool.addresses]
        status = 200 if pool.models else 503
        return JSONResponse({"status": "ok" if pool.models else "unavailable", "tritons": tritons}, status)

    @app.get("/metrics", include_in_schema=False)
    async def figures(request: Request) -> Response:
        service = Service.of(request)
        for one in service.core.pool.addresses:
            service.metrics.outstanding.labels(one.url).set(one.outstanding)
            service.metrics.ready.labels(one.url).set(bool(one.models))
        return Response(service.metrics.page(), media_type=service.metrics.content_type)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(UnavailableError)
    async def unavailable(request: Request, error: UnavailableError) -> Response:
        return error_response(ApiError(503, str(error), code="unavailable", retry_after=1))

    @app.exception_handler(HTTPException)
    async def of_the_framework(request: Request, error: HTTPException) -> Response:
        words = {404: f"there is no {request.url.path}", 405: f"{request.method} is not for {request.url.path}"}
        return error_response(ApiError(error.status_code, words.get(error.status_code, str(error.detail))))

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        # uvicorn logs it.
        return error_response(ApiError(500, "an error of the service itself; its log has the details"))
