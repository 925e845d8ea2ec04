"""The speech service as a command: its options, from the command line or the environment, and its server.

Every option can be set in the environment as well: --max_streams as SPEECH_MAX_STREAMS, lists separated by commas.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cosyvoice_triton.speech_service.settings import Settings

if TYPE_CHECKING:
    import uvicorn

    from cosyvoice_triton.speech_service.routes.runtime_grpc import Endpoint

DRAIN_SECONDS = 30
ENVIRONMENT = "SPEECH_"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def build_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )

    def add(name: str, default: Any, help: str, **how: Any) -> None:
        if isinstance(default, (int, float, Path)):
            help = f"{help} (default: {default})"
        given = os.environ.get(f"{ENVIRONMENT}{name.upper()}")
        if given is not None:
            default = [part.strip() for part in given.split(",") if part.strip()] if "nargs" in how else given
        parser.add_argument(f"--{name}", default=default, help=help, **how)

    add(
        "url",
        list(Settings.urls),
        nargs="+",
        help=f"gRPC addresses of Triton; the least busy one is used (default: {Settings.urls[0]})",
    )
    add("ref_audios_dir", Settings.voices_dir, type=Path, help="folder of the registered voices")
    add(
        "voice_aliases",
        list(Settings.voice_aliases),
        nargs="*",
        help="further names of voices, such as alloy=anna; one without a voice gets one of those registered; default: "
        "OpenAI's names",
    )
    add("host", LOOPBACK[0], help=f"0.0.0.0 to accept other hosts; then also set --api_keys (default: {LOOPBACK[0]})")
    add("port", 10086, type=int, help="0: any free one")
    add("runtime_port", None, type=int, help="serve the plain runtime's gRPC service too; its clients expect 50000")
    add(
        "model",
        Settings.model,
        help="for requests that name no served model; default: the first one served",
    )
    add("default_sample_rate", Settings.sample_rate, type=int, help="Hz of answers to requests without a sample_rate")
    add("api_keys", [], nargs="+", help="accepted keys; better set in SPEECH_API_KEYS")
    add("cors_origins", [], nargs="+", help="sites whose pages may use this service, such as https://example.org; *")
    add(
        "allowed_hosts",
        [],
        nargs="+",
        help="names by which this service may be addressed, such as speech.example.org or *.example.org; default: "
        "localhost with a --host of this machine only, otherwise any",
    )
    add("max_streams", Settings.max_streams, type=int, help="concurrent streams; more are answered 429")
    add("max_sessions", Settings.max_sessions, type=int, help="limit of open WebSockets")
    add("max_input_chars", Settings.max_input_chars, type=int, help="limit of a text, in characters")
    add("max_reference_mb", Settings.max_reference_mb, type=int, help="size limit of an uploaded recording, in MiB")
    add("max_batch", Settings.max_batch, type=int, help="limit of texts in one batch")
    add("max_connections", Settings.max_connections, type=int, help="open HTTP connections; more are answered 503")
    add("timeout", Settings.timeout, type=float, help="seconds for a whole answer")
    add("stall", Settings.stall, type=float, help="seconds that a client may leave its audio unread")
    add("receive_timeout", Settings.receive_timeout, type=float, help="seconds in which a request must have arrived")
    add(
        "idle",
        Settings.idle,
        type=float,
        help="seconds that a WebSocket may be silent, or a gRPC connection without calls",
    )
    return parser


def main(argv: Sequence[str] | None = None, description: str = str(__doc__)) -> int:
    """Parse the options and serve until SIGTERM; returns the exit code."""
    args = build_parser(description).parse_args(argv)
    try:
        settings = settings_of(args)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return serve(args, settings)


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings; ValueError naming an invalid option."""
    return Settings(
        urls=tuple(args.url),
        voices_dir=args.ref_audios_dir,
        voice_aliases=tuple(args.voice_aliases),
        model=args.model,
        sample_rate=args.default_sample_rate,
        api_keys=tuple(args.api_keys),
        cors_origins=tuple(args.cors_origins),
        allowed_hosts=tuple(args.allowed_hosts) or (Settings.allowed_hosts if args.host in LOOPBACK else ("*",)),
        max_streams=args.max_streams,
        max_sessions=args.max_sessions,
        max_input_chars=args.max_input_chars,
        max_reference_mb=args.max_reference_mb,
        max_batch=args.max_batch,
        max_connections=args.max_connections,
        timeout=args.timeout,
        stall=args.stall,
        receive_timeout=args.receive_timeout,
        idle=args.idle,
    )


def serve(args: argparse.Namespace, settings: Settings) -> int:
    """Serve until SIGTERM; 1 if the server could not start."""
    from cosyvoice_triton.speech_service.routes.runtime_grpc import Endpoint
    from cosyvoice_triton.speech_service.security.guard import (
        RequestIdFilter,  # here, so that --help and invalid options are fast
    )

    log = logging.StreamHandler()
    log.addFilter(RequestIdFilter())
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s [%(request)s] %(message)s", handlers=[log]
    )
    if args.host not in LOOPBACK and not settings.api_keys:
        logging.warning("everyone who can reach %s:%d may speak and add voices: set --api_keys", args.host, args.port)
    runtime = None if args.runtime_port is None else Endpoint(args.host, args.runtime_port)
    server = http_server(settings, args.host, args.port, runtime)
    with contextlib.suppress(KeyboardInterrupt):  # raised again after the server has ended
        server.run()
    return 0 if server.started else 1


def http_server(
    settings: Settings, host: str, port: int, runtime: "Endpoint | None" = None, drain_seconds: int = DRAIN_SECONDS
) -> "uvicorn.Server":
    """The server, not running yet. drain_seconds: that live streams have to end after SIGTERM."""
    import uvicorn

    from cosyvoice_triton.speech_service.app import build
    from cosyvoice_triton.speech_service.security.protocol import LimitedProtocol

    return uvicorn.Server(
        uvicorn.Config(
            build(settings, runtime),
            host=host,
            port=port,
            access_log=False,  # see /metrics instead
            log_config=None,
            http=cast(type[asyncio.Protocol], partial(LimitedProtocol, settings)),
            limit_concurrency=settings.max_connections,
            ws="websockets-sansio",
            ws_max_size=settings.max_body_bytes,
            ws_per_message_deflate=False,  # a few kilobytes could become a message of the largest size
            timeout_graceful_shutdown=drain_seconds,
        )
    )
