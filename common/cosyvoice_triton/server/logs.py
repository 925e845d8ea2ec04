"""The log file of tritonserver: earlier ones are kept, none grows without bound, and why a server failed is found."""

import logging
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
ERROR = re.compile(r"E\d{4} (?!.*CudaDriverHelper)")  # of tritonserver; without a GPU each log has the other one
NOT_LOADED = re.compile(r"\| (\S+) +\| \S+ +\| UNAVAILABLE: (?:Internal: )?(.*?) *\|$")  # of its table of models
KEPT = 3  # earlier files: log.1, the most recent, to log.3


class LogRotation:
    """Moves the content of a log on to log.1, and older files by one, while tritonserver appends to it."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._failed_at = 0  # bytes of the log when the last attempt failed

    def rotate(self, above: int = 0) -> None:
        """Rotate a log of more than `above` bytes; never raises.

        The log stays the same file, because tritonserver has it open. Lines that it writes during the copy may be lost.
        A disk without room for the copy is warned of once: the log grows on, and the next attempt is made when it has
        grown by MAX_BYTES, because an attempt may take seconds of a disk.
        """
        size = 0
        try:
            size = self._log.stat().st_size if self._log.is_file() else 0
            if size <= above or self._failed_at and size < self._failed_at + MAX_BYTES:
                return
            _shift(self._log)
            self._failed_at = 0
        except OSError as error:
            if not self._failed_at:
                logger.warning("the log %s is not rotated and grows on: %s", self._log, error)
            self._failed_at = size or 1


def _shift(log: Path) -> None:
    names = [log.with_name(f"{log.name}.{number}") for number in range(1, KEPT + 1)]
    copy = log.with_name(f"{log.name}.new")
    try:
        shutil.copyfile(log, copy)  # first of all: if it fails, nothing has changed
        for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
            if newer.exists():
                newer.rename(older)
        copy.rename(names[0])
    except OSError:
        with suppress(OSError):
            copy.unlink(missing_ok=True)
        raise
    os.truncate(log, 0)


def failure(log: Path) -> str:
    """Return the last errors of a log, and last of all why models were not loaded or, if that is not known, its last
    line: what ended the process may be no error of Triton's, such as "what():  bad_alloc"."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    errors = [line.replace("\\n", "\n") for line in lines if ERROR.match(line) and "failed to load" not in line]
    causes = [f"{found[1]}: {found[2]}" for line in lines if (found := NOT_LOADED.match(line))]
    return "\n".join([*errors[-6:], *(causes or lines[-1:])]) or f"its log {log} is empty, or was removed"
