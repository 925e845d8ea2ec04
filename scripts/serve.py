"""Serve a rendered repository until SIGTERM, Ctrl-C or a model's death: the first process of the containers.

    python -m scripts.render models/demo build/dit
    python -m scripts.serve build/dit

Runs the tritonserver of the nvidia-pytriton wheel, or that of NVIDIA's image where the wheel is not installed.
SIGTERM: the health page says 503, new requests are refused, live ones have --drain-seconds to end, then the server
does. Ctrl-C, or a second SIGTERM, ends it at once. Health: http://HOST:8003/ready and /live.
"""

import argparse
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from common.server.supervisor import HealthPage, drain
from common.server.tritonserver import Ports, ServerError, TritonServer, require_free
from common.speech_service.beside import speech_service

REDIS_PORT = 6379


class Terminated(BaseException):
    """SIGTERM came."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path, help="what scripts/render.py wrote")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 to be reached from elsewhere")
    parser.add_argument("--http-port", type=int, default=8000, help="0: any free port; so for the others")
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    parser.add_argument("--health-port", type=int, default=8003)
    parser.add_argument("--cache-mib", type=int, default=64, help="response cache of the prompt models, in memory")
    parser.add_argument(
        "--redis",
        default="",
        metavar="HOST[:PORT]",
        help="response cache shared by several servers instead; password in TRITONCACHE_REDIS_PASSWORD",
    )
    parser.add_argument("--speech-port", type=int, help="serve speech over HTTP there too, see docs/http.md")
    parser.add_argument("--voices", type=Path, default=Path("models/demo/voices"), help="of the speech service")
    parser.add_argument("--drain-seconds", type=float, default=60, help="for live requests to end after SIGTERM (60)")
    parser.add_argument(
        "--notice-seconds",
        type=float,
        default=0,
        help="after SIGTERM still take requests while the health page says 503, so that balancers turn away (0)",
    )
    parser.add_argument("--log-file", type=Path, default=Path("tritonserver.log"), help="-: this command's own output")
    return parser


def cache_option(redis: str, mib: int) -> str:
    """The value of Triton's --cache-config."""
    if not redis:
        return f"local,size={mib << 20}"
    host, _, port = redis.partition(":")
    if not host or not (port or str(REDIS_PORT)).isdigit():
        raise ValueError(f"--redis {redis!r} is not HOST or HOST:PORT")
    return f"redis,host={host},port={port or REDIS_PORT}"


def beside(server: TritonServer, args: argparse.Namespace) -> contextlib.AbstractContextManager[threading.Event]:
    """The speech service, where it is asked for."""
    if args.speech_port is None:
        return contextlib.nullcontext(threading.Event())
    return speech_service(server.grpc_url, args.voices, args.host, args.speech_port)


def _terminate(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, _interrupt)  # the second one means it
    raise Terminated


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if not args.repository.is_dir():
        print(
            f"{args.repository} is not there; run: python -m scripts.render MODELS {args.repository}", file=sys.stderr
        )
        return 1
    signal.signal(signal.SIGTERM, _terminate)
    print(f"starting tritonserver over {args.repository}, log in {args.log_file} ...", flush=True)
    try:
        return serve(args)
    except (ValueError, ServerError) as error:
        print(error, file=sys.stderr)
        return 1
    except (KeyboardInterrupt, Terminated):
        print("stopped")
        return 0


def serve(args: argparse.Namespace) -> int:
    """Until the server ends; the exit code."""
    if args.health_port:
        require_free(args.health_port, args.host)
    server = TritonServer(
        args.repository.resolve(),
        ports=Ports(args.http_port, args.grpc_port, args.metrics_port),
        host=args.host,
        cache=cache_option(args.redis, args.cache_mib),
        log_file=args.log_file,
    )
    with HealthPage(server, args.host, args.health_port) as health, server, beside(server, args) as speech_ended:
        health.state = "ready"
        print(f"ready: http {server.http_url}  grpc {server.grpc_url}  metrics {server.metrics_url}/metrics")
        print(f"health {health.url}/ready", flush=True)
        if args.speech_port is not None:
            print(f"speech http://{args.host}:{args.speech_port}")
        print("Ctrl-C to stop", flush=True)
        try:
            code = server.wait()
        except Terminated:
            drain(server, health, args.notice_seconds, args.drain_seconds)
            if speech_ended.is_set():
                print("the speech service ended by itself", file=sys.stderr)
                return 1
            return 0
        finally:
            health.state = "stopping"
        print(f"tritonserver ended by itself with code {code}; see {args.log_file}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
