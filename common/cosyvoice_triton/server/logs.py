"""The log file of tritonserver: earlier ones are kept, and none grows without bound."""

import os
import shutil
from pathlib import Path

MAX_BYTES = 64 << 20
KEPT = 3  # earlier files: log.1, the most recent, to log.3


def rotate(log: Path, above: int = 0) -> None:
    """Move the content of `log` to log.1, and older files on by one, if it has more than `above` bytes.

    The file stays the same, because tritonserver has it open (for appending). Lines that it writes during the copy may
    be lost.
    """
    if not log.is_file() or log.stat().st_size <= above:
        return
    names = [log.with_name(f"{log.name}.{number}") for number in range(1, KEPT + 1)]
    for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
        if newer.exists():
            newer.rename(older)
    shutil.copyfile(log, names[0])
    os.truncate(log, 0)
