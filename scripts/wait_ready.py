"""Wait until every page answers 200; exit code 1, with the last word of those that do not, when time is up.

    python -m scripts.wait_ready http://localhost:8003/ready                      up to five minutes
    python -m scripts.wait_ready --seconds 0 http://localhost:8003/ready          once: a container's health check
    python -m scripts.wait_ready --process 4711 http://localhost:18000/v2/health/ready

With --process it ends at once when that process has ended, since nobody is left to become ready.
"""

import argparse
import sys
from collections.abc import Sequence

from common.server.readiness import wait


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--seconds", type=float, default=300, help="how long to wait (300); 0: ask once")
    parser.add_argument("--process", type=int, metavar="PID", help="stop waiting when it ends")
    args = parser.parse_args(argv)
    try:
        faults = wait(args.urls, args.seconds, args.process)
    except KeyboardInterrupt:
        return 130
    print("\n".join(faults), end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
