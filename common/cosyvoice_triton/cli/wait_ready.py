"""Wait until every URL answers 200. On timeout the exit code is 1 and the last error of each other URL is printed.

    cosyvoice-triton wait http://localhost:8003/ready                      up to five minutes
    cosyvoice-triton wait --seconds 0 http://localhost:8003/ready          once: a container's health check
    cosyvoice-triton wait --process 4711 http://localhost:18000/v2/health/ready

With --process it stops as soon as that process has ended.
"""

import sys
from collections.abc import Sequence

from cosyvoice_triton.arguments import command_parser, reporting_errors
from cosyvoice_triton.server.readiness import wait


@reporting_errors()
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--seconds", type=float, default=300, help="how long to wait (300); 0: try once")
    parser.add_argument("--process", type=int, metavar="PID", help="stop waiting when it ends")
    args = parser.parse_args(argv)
    for url in args.urls:
        if not url.startswith(("http://", "https://")):
            parser.error(f"'{url}' is not a page's address, such as http://localhost:8003/ready")
    faults = wait(args.urls, args.seconds, args.process)
    print("\n".join(faults), end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0
