"""Compiles the library that tritonserver is started with, so that no shape of an input ends it (input_shapes.c)."""

import logging
import shutil
import subprocess
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_suffix(".c")
COMPILE_SECONDS = 60  # 0.05 on an idle machine


def compile_library(directory: Path) -> Path | None:
    """Compile the library into `directory` and return its path; None, with a warning, if this machine cannot."""
    library = directory / "libinput_shapes.so"
    # Without the C library's files, which Debian has in another package than the compiler.
    command = [shutil.which("cc") or "gcc", "-O1", "-shared", "-fPIC", "-nostdlib", "-o", str(library)]
    try:
        subprocess.run([*command, str(SOURCE)], check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        logger.warning(
            "no C compiler for the check of inputs' shapes: whoever reaches the gRPC port can end the server with one "
            "message; let only callers you trust reach it, or run: apt-get install gcc (%s)",
            reason.strip().splitlines()[-1],
        )
        return None
    return library
