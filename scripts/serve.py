"""Serve a rendered repository with the tritonserver of the nvidia-pytriton wheel, until Ctrl-C or a model's death.

    python -m scripts.render models/demo build/dit
    python -m scripts.serve build/dit

Inside NVIDIA's image run its own tritonserver on the same repository instead.
"""

import argparse
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from common.server import Ports, ServerError, TritonServer
from common.speech_service.beside import speech_service


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path, help="what scripts/render.py wrote")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 to be reached from elsewhere")
    parser.add_argument("--http-port", type=int, default=8000, help="0: any free port; so for the others")
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    parser.add_argument("--cache-mib", type=int, default=64, help="response cache of the prompt models")
    parser.add_argument("--speech-port", type=int, help="serve speech over HTTP there too, see docs/http.md")
    parser.add_argument("--voices", type=Path, default=Path("models/demo/voices"), help="of the speech service")
    parser.add_argument("--log-file", type=Path, default=Path("tritonserver.log"))
    return parser


def beside(server: TritonServer, args: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """The speech service, where it is asked for."""
    if args.speech_port is None:
        return contextlib.nullcontext()
    print(f"speech http://{args.host}:{args.speech_port}")
    return speech_service(server.grpc_url, args.voices, args.host, args.speech_port)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if not args.repository.is_dir():
        print(
            f"{args.repository} is not there; run: python -m scripts.render MODELS {args.repository}", file=sys.stderr
        )
        return 1
    signal.signal(signal.SIGTERM, _interrupt)  # `kill` ends the server in order, as Ctrl-C does
    server = TritonServer(
        args.repository.resolve(),
        ports=Ports(args.http_port, args.grpc_port, args.metrics_port),
        host=args.host,
        cache_bytes=args.cache_mib << 20,
        log_file=args.log_file,
    )
    print(f"starting tritonserver over {args.repository}, log in {args.log_file} ...", flush=True)
    try:
        with server, beside(server, args):
            print(f"ready: http {server.http_url}  grpc {server.grpc_url}  metrics {server.metrics_url}/metrics")
            print("Ctrl-C to stop", flush=True)
            code = server.wait()
            print(f"tritonserver ended by itself with code {code}; see {args.log_file}", file=sys.stderr)
            return 1
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped")
        return 0


if __name__ == "__main__":
    sys.exit(main())
