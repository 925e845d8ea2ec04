"""Serve a stack until SIGTERM, Ctrl-C or the death of a model's process: the first process of containers.

    cosyvoice-triton serve                                            the demo voice, rendered to build/dit
    cosyvoice-triton serve --models models/official --stack unet --set max_streams=32
    cosyvoice-triton serve build/dit                                  a repository that `render` wrote

Runs the tritonserver of the nvidia-pytriton wheel, or the one in NVIDIA's image if the wheel is not installed.
On SIGTERM the health page answers 503, new requests are refused and live ones get --drain-seconds to end; then the
server stops. Ctrl-C or a second SIGTERM stops it at once. Health: http://HOST:8003/ready and /live.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cosyvoice_triton.addresses import join
from cosyvoice_triton.arguments import command_parser
from cosyvoice_triton.cli.render import add_stack_options, given_options, render_stack
from cosyvoice_triton.constants import HEALTH_PORT
from cosyvoice_triton.demo_checkpoint import DEMO, DEMO_SETTINGS
from cosyvoice_triton.prepare import steps
from cosyvoice_triton.server import gpus, serving
from cosyvoice_triton.server.response_cache import cache_option
from cosyvoice_triton.server.tritonserver import CACHE_MIB, LOOPBACK, Ports, ServerError, TritonServer
from cosyvoice_triton.speech_service.sidecar import speech_service


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("repository", type=Path, nargs="?", help="a rendered repository; default: render one first")
    add("--host", default=LOOPBACK, help="0.0.0.0 to accept connections to all but Triton's own endpoints")
    add(
        "--http-host",
        default=LOOPBACK,
        help="address of Triton's HTTP endpoint; another one only behind the gateway, see SECURITY.md",
    )
    add("--grpc-host", default=LOOPBACK, help="address of Triton's gRPC endpoint; another one only behind the gateway")
    add("--http-port", type=int, default=Ports.http, help="0: any free port, also for the others (%(default)s)")
    add("--grpc-port", type=int, default=Ports.grpc, help="default: %(default)s")
    add("--metrics-port", type=int, default=Ports.metrics, help="of Triton's own metrics (%(default)s)")
    add("--health-port", type=int, default=HEALTH_PORT, help="/ready, /live and our metrics (%(default)s)")
    add("--cache-mib", type=int, default=CACHE_MIB, help="memory of the prompt models' response cache")
    add(
        "--redis",
        default="",
        metavar="HOST[:PORT]",
        help="response cache shared by several servers instead; password in TRITONCACHE_REDIS_PASSWORD",
    )
    add("--speech-port", type=int, help="also serve speech over HTTP on this port, see docs/http.md")
    add("--voices", type=Path, help="of the speech service; default: the folder voices of --models")
    add("--drain-seconds", type=float, default=60, help="for live requests to end after SIGTERM (60)")
    add(
        "--notice-seconds",
        type=float,
        default=0,
        help="after SIGTERM keep accepting requests this long while the health page answers 503, so that load "
        "balancers stop sending (0)",
    )
    add("--log-file", type=Path, default=Path("tritonserver.log"), help="-: this command's own output")
    rendering = parser.add_argument_group("rendering", "without a repository: options of `cosyvoice-triton render`")
    rendering.add_argument(
        "--models",
        type=Path,
        default=DEMO,
        help="directory with the checkpoints (default: %(default)s, written if it is missing)",
    )
    add_stack_options(rendering)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    voices = args.voices or args.models / "voices"
    serving.raise_on_sigterm()
    if args.grpc_host != LOOPBACK:
        logging.warning(
            "tritonserver's gRPC port %s ends the server if a client sends the header triton_grpc_error: offer it "
            "through the gateway only, which removes this header (SECURITY.md)",
            join(args.grpc_host, args.grpc_port),
        )
    elif args.host != LOOPBACK:
        logging.warning(
            "tritonserver's gRPC and HTTP ports accept connections of this machine only; others use the speech service "
            "or the gateway (SECURITY.md)"
        )
    try:
        repository = rendered_repository(args)
        say(f"starting tritonserver over {repository}, log in {args.log_file} ...")
        server = TritonServer(
            repository.resolve(),
            ports=Ports(args.http_port, args.grpc_port, args.metrics_port),
            host=args.host,
            http_host=args.http_host,
            grpc_host=args.grpc_host,
            cache=cache_option(args.redis, args.cache_mib),
            log_file=args.log_file,
        )
        port = args.speech_port
        serving.serve(
            server,
            health_port=args.health_port,
            announce=say,
            speech_port=port,
            speech=None if port is None else speech_service(server.grpc_url, voices, args.host, port),
            notice_seconds=args.notice_seconds,
            drain_seconds=args.drain_seconds,
        )
    except (ValueError, OSError, ServerError) as error:
        print(error, file=sys.stderr)
        return 1
    except (KeyboardInterrupt, serving.Terminated):
        say("stopped")
    return 0


def say(lines: str) -> None:
    """Print lines that the server can do without: its output may be a file on a full disk, or a closed pipe."""
    try:
        print(lines, flush=True)
    except OSError:  # Python would try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def rendered_repository(args: argparse.Namespace) -> Path:
    """Return the named repository, or render build/STACK. Raise ValueError if there is none, or no GPU for it."""
    if args.repository is None:
        if args.models == DEMO:
            steps.demo(args.models, args.stack)
            args.settings = [*(f"{key}={value}" for key, value in DEMO_SETTINGS.items()), *args.settings]
        if args.device == "gpu":
            gpus.used(args.device)  # before anything is loaded
        repository = Path("build", args.stack)
        render_stack(args.models, repository, args)
        return repository
    if not args.repository.is_dir():
        raise ValueError(f"{args.repository} does not exist; run: cosyvoice-triton render MODELS {args.repository}")
    if given := given_options(args):
        raise ValueError(f"{', '.join(given)}: options of a rendering, but {args.repository} is rendered already")
    return Path(args.repository)
