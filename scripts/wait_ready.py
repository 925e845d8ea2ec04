"""Wait until every page answers 200; exit code 1, with the last word of those that do not, when time is up.

    python -m scripts.wait_ready http://localhost:8003/ready                      up to five minutes
    python -m scripts.wait_ready --seconds 0 http://localhost:8003/ready          once: a container's health check
    python -m scripts.wait_ready --process 4711 http://localhost:18000/v2/health/ready

With --process it ends at once when that process has ended, since nobody is left to become ready.
"""

import argparse
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

POLL_SECONDS = 0.5
ANSWER_SECONDS = 5.0


def fault(url: str) -> str | None:
    """Why a page is not ready; None when it is."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
            return None if answer.status == 200 else f"HTTP {answer.status}"
    except urllib.error.HTTPError as error:
        with error:
            words = error.read(200).decode(errors="replace").strip()
        return f"HTTP {error.code} {words}".strip()
    except (OSError, ValueError) as error:
        return str(error)


def wait(urls: Sequence[str], seconds: float, process: int | None = None) -> list[str]:
    """A line for each page that was not ready in time; none when all were."""
    deadline = time.monotonic() + seconds
    waiting = list(urls)
    while True:
        faults = {url: why for url in waiting if (why := fault(url)) is not None}
        if not faults:
            return []
        waiting = list(faults)
        lines = [f"{url} is not ready: {why}" for url, why in faults.items()]
        if process is not None and not is_alive(process):
            return [f"process {process} has ended", *lines]
        if time.monotonic() >= deadline:
            return lines
        time.sleep(POLL_SECONDS)


def is_alive(process: int) -> bool:
    """Whether it runs; one that has ended and that nobody has asked about does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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
