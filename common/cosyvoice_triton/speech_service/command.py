"""Speech over HTTP in front of Triton: the routes of OpenAI's API, voices, a WebSocket and a web page to try it on.

    cosyvoice-triton serve --speech-port 10086           Triton and this service together
    cosyvoice-triton speech --url localhost:8001         next to a Triton that is running already
    cosyvoice-triton speech --url gpu1:8001 gpu2:8001 --host 0.0.0.0 --api_keys "$KEY"

    curl http://localhost:10086/v1/audio/speech -o hello.mp3 \\
        -H 'Content-Type: application/json' -d '{"model": "tts-1", "input": "Hello.", "voice": "anna"}'

Every option can be set in the environment as well: --max_streams as SPEECH_MAX_STREAMS, lists separated by commas. The
service accepts connections from this machine only, unless --host is given. docs/http.md lists the routes and fields.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cosyvoice_triton.addresses import join
from cosyvoice_triton.arguments import command_parser
from cosyvoice_triton.speech_service.settings import LOOPBACK, Settings

if TYPE_CHECKING:
    import uvicorn

DRAIN_SECONDS = 30  # most answers take less, and Kubernetes kills after 60 s (deploy/k8s/speech.yaml)
ENVIRONMENT = "SPEECH_"


def build_parser() -> argparse.ArgumentParser:
    """Return a parser of all `Settings`, whose defaults the environment may replace."""
    parser = command_parser(__doc__)
    for setting in fields(Settings):
        default, help, option = setting.default, setting.metadata["help"], setting.metadata["name"] or setting.name
        how: dict[str, Any] = {"type": int if default is None else type(default)}
        if isinstance(default, tuple):
            how, default = {"nargs": "*"}, list(default)
        if isinstance(default, (int, float, Path)) or option in ("url", "host"):
            help = f"{help} (default: {default[0] if isinstance(default, list) else default})"
        if (given := os.environ.get(f"{ENVIRONMENT}{option.upper()}")) is not None:
            default = [part.strip() for part in given.split(",") if part.strip()] if "nargs" in how else given
        parser.add_argument(f"--{option}", dest=setting.name, default=default, help=help, **how)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and serve until SIGTERM; return 1 if an option is wrong or the server could not start."""
    args = vars(build_parser().parse_args(argv))
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in args.items()}
    try:
        settings = Settings(**given)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    # Here: --help and errors are fast.
    from cosyvoice_triton.speech_service.security.guard import RequestIdFilter, key_name

    log = logging.StreamHandler()
    log.addFilter(RequestIdFilter())
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s [%(request)s] %(message)s", handlers=[log]
    )
    if settings.host not in LOOPBACK and not settings.api_keys:
        logging.warning(
            "everyone who can reach %s may speak and add voices: set --api_keys", join(settings.host, settings.port)
        )
    for number, key in enumerate(settings.api_keys, 1):
        logging.info(
            "API key %d of %d is called %s in metrics and voices", number, len(settings.api_keys), key_name(key)
        )
    server = http_server(settings)
    with contextlib.suppress(KeyboardInterrupt):  # raised again after the server has ended
        server.run()
    return 0 if server.started else 1


def http_server(settings: Settings, drain_seconds: int = DRAIN_SECONDS) -> "uvicorn.Server":
    """Return the server, not running yet. drain_seconds: that live streams have to end after SIGTERM."""
    import uvicorn

    from cosyvoice_triton.speech_service.app import build
    from cosyvoice_triton.speech_service.security.connection_limits import LimitedProtocol, LimitedSocket

    app = build(settings)

    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            access_log=False,  # see /metrics instead
            log_config=None,
            http=cast(type[asyncio.Protocol], partial(LimitedProtocol, settings, app.state.budget)),
            limit_concurrency=settings.max_connections,
            ws=cast(type[asyncio.Protocol], partial(LimitedSocket, settings, app.state.budget)),
            ws_max_size=settings.max_body_bytes,
            ws_per_message_deflate=False,  # a few kilobytes could become a message of the largest size
            timeout_keep_alive=settings.keep_alive,  # type: ignore[arg-type]  # a part of a second works, too
            timeout_graceful_shutdown=drain_seconds,
        )
    )
