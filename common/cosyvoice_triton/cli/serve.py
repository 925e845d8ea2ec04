"""Serve a rendered repository until SIGTERM, Ctrl-C or the death of a model's process: the first process of containers.

    cosyvoice-triton render models/demo build/dit
    cosyvoice-triton serve build/dit

Runs the tritonserver of the nvidia-pytriton wheel, or the one in NVIDIA's image if the wheel is not installed.
On SIGTERM the health page answers 503, new requests are refused and live ones get --drain-seconds to end; then the
server stops. Ctrl-C or a second SIGTERM stops it at once. Health: http://HOST:8003/ready and /live.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cosyvoice_triton.constants import HEALTH_PORT
from cosyvoice_triton.server import serving
from cosyvoice_triton.server.tritonserver import CACHE_MIB, LOOPBACK, Ports, ServerError, TritonServer
from cosyvoice_triton.speech_service.sidecar import speech_sidecar


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path, help="the directory that cosyvoice_triton.cli.render wrote")
    parser.add_argument("--host", default=LOOPBACK, help="0.0.0.0 to accept connections from other machines")
    parser.add_argument(
        "--http-host",
        default=LOOPBACK,
        help="address of Triton's HTTP endpoint; another one only behind the gateway, see docs/security.md",
    )
    parser.add_argument(
        "--http-port", type=int, default=Ports.http, help="0: any free port, also for the others (%(default)s)"
    )
    parser.add_argument("--grpc-port", type=int, default=Ports.grpc, help="default: %(default)s")
    parser.add_argument("--metrics-port", type=int, default=Ports.metrics, help="of Triton's own metrics (%(default)s)")
    parser.add_argument(
        "--health-port", type=int, default=HEALTH_PORT, help="/ready, /live and our metrics (%(default)s)"
    )
    parser.add_argument("--cache-mib", type=int, default=CACHE_MIB, help="memory of the prompt models' response cache")
    parser.add_argument(
        "--redis",
        default="",
        metavar="HOST[:PORT]",
        help="response cache shared by several servers instead; password in TRITONCACHE_REDIS_PASSWORD",
    )
    parser.add_argument("--speech-port", type=int, help="also serve speech over HTTP on this port, see docs/http.md")
    parser.add_argument("--voices", type=Path, default=Path("models/demo/voices"), help="of the speech service")
    parser.add_argument("--drain-seconds", type=float, default=60, help="for live requests to end after SIGTERM (60)")
    parser.add_argument(
        "--notice-seconds",
        type=float,
        default=0,
        help="after SIGTERM keep accepting requests this long while the health page answers 503, so that load "
        "balancers stop sending (0)",
    )
    parser.add_argument("--log-file", type=Path, default=Path("tritonserver.log"), help="-: this command's own output")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if not args.repository.is_dir():
        render = f"cosyvoice-triton render MODELS {args.repository}"
        print(f"{args.repository} does not exist; run: {render}", file=sys.stderr)
        return 1
    serving.raise_on_sigterm()
    print(f"starting tritonserver over {args.repository}, log in {args.log_file} ...", flush=True)
    try:
        server = TritonServer(
            args.repository.resolve(),
            ports=Ports(args.http_port, args.grpc_port, args.metrics_port),
            host=args.host,
            http_host=args.http_host,
            cache=serving.cache_option(args.redis, args.cache_mib),
            log_file=args.log_file,
        )
        serving.serve(
            server,
            health_port=args.health_port,
            announce=partial(print, flush=True),
            companion=None if args.speech_port is None else speech_sidecar(args.voices, args.host, args.speech_port),
            notice_seconds=args.notice_seconds,
            drain_seconds=args.drain_seconds,
        )
    except (ValueError, ServerError) as error:
        print(error, file=sys.stderr)
        return 1
    except (KeyboardInterrupt, serving.Terminated):
        print("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
