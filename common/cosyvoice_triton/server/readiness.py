"""Wait until HTTP pages answer 200."""

import http.client
import time
import urllib.error
from collections.abc import Sequence
from pathlib import Path

from cosyvoice_triton.addresses import open_page

POLL_SECONDS = 0.5
ANSWER_SECONDS = 5.0


def fault(url: str) -> str | None:
    """Return why a page is not ready; None if it is."""
    try:
        with open_page(url, ANSWER_SECONDS) as answer:
            return None if answer.status == 200 else f"HTTP {answer.status}"
    except urllib.error.HTTPError as error:
        with error:
            reason = error.read(200).decode(errors="replace").strip()
        return f"HTTP {error.code} {reason}".strip()
    except (OSError, ValueError, http.client.HTTPException) as error:  # HTTPException: the answer is not HTTP
        return str(error).strip() or type(error).__name__


def wait(urls: Sequence[str], seconds: float, process: int | None = None) -> list[str]:
    """Wait at most `seconds`, or until `process` ends; return one line per page that was not ready in time."""
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
    """Return whether the process is running; a zombie is not."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False
