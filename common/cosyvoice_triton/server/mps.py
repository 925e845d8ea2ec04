"""CUDA's MPS for the models of one server, so that the LLM and token2wav compute on a GPU at the same time.

Without it the driver gives the GPU to one process at a time. Its daemon comes with the driver, also in containers of
NVIDIA's runtime; it needs no rights beyond those of the processes that share the GPU.
"""

import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cosyvoice_triton.server import gpus

logger = logging.getLogger(__name__)

PROGRAM = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"  # where CUDA looks for a daemon; set: somebody has decided
DEFAULT_PIPES = Path("/tmp/nvidia-mps")  # where it looks otherwise
START_SECONDS = 10.0
ANSWER_SECONDS = 10.0
QUIT_SECONDS = 10.0
WITHOUT_MPS = "the LLM and token2wav take turns on the GPU: first chunks come later, and fewer listeners are admitted"

# Runs the daemon until a line, or the end of the file when its parent has died, arrives on stdin. The server that the
# daemon starts for CUDA ends with it.
_RUN = f'{{ {PROGRAM} -f; : >"$1/ended"; }} & read -r _; echo quit -t 5 | {PROGRAM}; wait'

_ON_GPU = re.compile(r'(kind: |")KIND_(AUTO|GPU)')  # in a rendered config.pbtxt, but not in its comments


@contextmanager
def shared_gpu(repository: Path) -> Iterator[None]:
    """Run MPS for the processes that are started in the block, if several of the repository's models share a GPU.

    One that runs already, on this machine or where CUDA_MPS_PIPE_DIRECTORY says, is used instead. Where MPS cannot be
    had, a warning says what that costs.
    """
    if PIPES in os.environ or _answers(DEFAULT_PIPES) or not _share(repository):
        yield
        return
    # Short names: a socket's path has at most 108 bytes.
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        variables = {PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        if os.environ.get("CUDA_VISIBLE_DEVICES"):  # numbers would be counted among those that the daemon sees
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in gpus.visible())
        daemon = subprocess.Popen(
            ["/bin/sh", "-c", _RUN, "mps", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | variables,
            start_new_session=True,  # Ctrl-C ends its clients first
        )
        before = {name: os.environ.get(name) for name in variables}
        try:
            if _listens(Path(folder)):
                os.environ.update(variables)
            else:
                logger.warning("CUDA MPS cannot be started (%s): %s", _reason(Path(folder)), WITHOUT_MPS)
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            with suppress(subprocess.TimeoutExpired):
                daemon.communicate(b"\n", QUIT_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()


def _share(repository: Path) -> bool:
    """Return whether at least two models compute on a GPU of this machine."""
    if not gpus.cuda_of_torch() or not gpus.visible():
        return False
    configs = [path.read_text() for path in repository.glob("*/config.pbtxt")]
    return sum(bool(_ON_GPU.search(config)) for config in configs) > 1


def _answers(folder: Path) -> bool:
    """Return whether a daemon answers in `folder`. One that has ended can leave its pipe there, and CUDA, which
    cannot connect to it, computes without MPS and says nothing."""
    if not (folder / "control").exists():
        return False
    if shutil.which(PROGRAM) is None:
        return True  # the host's, whose folder a container has
    variables = os.environ | {PIPES: str(folder)}
    try:
        asked = subprocess.run(
            PROGRAM, input=b"get_server_list\n", env=variables, capture_output=True, timeout=ANSWER_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0


def _listens(folder: Path) -> bool:
    """Return whether the daemon has made its pipe, which takes it a moment."""
    deadline = time.monotonic() + START_SECONDS
    while not (folder / "control").exists():
        if time.monotonic() > deadline or (folder / "ended").exists():
            return False
        time.sleep(0.05)
    return True


def _reason(folder: Path) -> str:
    """Return why it does not listen: the last line of its log."""
    if shutil.which(PROGRAM) is None:
        return f"{PROGRAM}, a part of the driver, is not installed"
    log = folder / "control.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return lines[-1] if lines else "it says nothing"
