"""Finds the tritonserver to run: the one in the nvidia-pytriton wheel, or that of NVIDIA's image.

The wheel contains the server (2.51), the python backend, a stub for each Python version and the local response cache,
but they have to be arranged in one backend directory, and it lacks the library path. The image needs neither.
"""

import ctypes
import importlib.metadata
import importlib.util
import logging
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

MIN_GLIBC = (2, 35)  # the wheel's platform tag: manylinux_2_35
IMAGE_ROOT = Path("/opt/tritonserver")  # where NVIDIA's images have it
STUB = "triton_python_backend_stub"
NUMPY_2 = b"numpy._core"  # what a stub that can also be used with numpy 2 imports
INPUT_SHAPES = Path(__file__).with_name("input_shapes.c")
COMPILE_SECONDS = 60  # 0.05 on an idle machine

logger = logging.getLogger(__name__)


class ServerError(RuntimeError):
    """The server cannot start, or ended unexpectedly. The message says what to do."""


@dataclass(frozen=True)
class Installation:
    """The files of a tritonserver.

    stub: the python backend's stub, if it has to be copied next to the backend first. libraries: directories that the
    loader does not search by default.
    """

    binary: Path
    backends: Path
    caches: Path
    stub: Path | None = None
    libraries: tuple[Path, ...] = ()

    @classmethod
    def find(cls) -> "Installation":
        """Return the installation of the running interpreter's wheel, else the image's. Raise ServerError if there is
        neither."""
        spec = importlib.util.find_spec("pytriton")  # not imported: only its files are needed
        if spec is not None and spec.submodule_search_locations:
            return cls._of_wheel(Path(spec.submodule_search_locations[0]))
        if (binary := IMAGE_ROOT / "bin" / "tritonserver").exists():
            _require_numpy(IMAGE_ROOT / "backends" / "python" / STUB)
            return cls(binary=binary, backends=IMAGE_ROOT / "backends", caches=IMAGE_ROOT / "caches")
        raise ServerError("tritonserver is not installed; run: make setup")

    @classmethod
    def _of_wheel(cls, package: Path) -> "Installation":
        libraries = require_machine()
        root = package / "tritonserver"
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = root / "python_backend_stubs" / version / STUB
        if not stub.exists():
            raise ServerError(f"tritonserver has no stub for Python {version}; run: make clean setup PYTHON=python3.11")
        _require_numpy(stub)
        return cls(
            binary=root / "bin" / "tritonserver",
            backends=root / "backends",
            caches=root / "caches",
            stub=stub,
            libraries=(package.parent / "nvidia_pytriton.libs", *libraries),
        )

    def backend_directory(self, work: Path) -> Path:
        """Return the --backend-directory, which is made in `work` if the stub is not next to its backend."""
        if self.stub is None:
            return self.backends
        directory = work / "backends" / "python"
        directory.mkdir(parents=True)
        for part in (self.backends / "python").iterdir():
            if part.is_file():
                (directory / part.name).symlink_to(part)
        # A copy, because some installers unpack wheels without the executable bit.
        shutil.copy(self.stub, directory / self.stub.name)
        (directory / self.stub.name).chmod(0o755)
        return directory.parent


def work_directory() -> Path:
    """Make a new temporary directory whose path a shell reads as one word: the python backend starts stubs by one."""
    plain = re.fullmatch(r"[\w./-]+", tempfile.gettempdir())
    return Path(tempfile.mkdtemp(prefix="tritonserver-", dir=None if plain else "/tmp"))


def require_machine() -> tuple[Path, ...]:
    """Return the directory of this interpreter's shared libpython, empty if the loader finds it without help. Raise
    ServerError if there is none, or the C library is too old."""
    name, release = platform.libc_ver()
    if name != "glibc" or tuple(int(part) for part in release.split(".")[:2]) < MIN_GLIBC:
        needed = ".".join(map(str, MIN_GLIBC))
        raise ServerError(
            f"tritonserver needs glibc {needed} or newer; this machine has {name or 'another C library'} {release}; "
            "run: docker run -it --network host -v $PWD:/src -w /src python:3.11-bookworm make demo"
        )
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    library = f"libpython{version}.so.1.0"
    for directory in (sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib"):
        if directory and (Path(directory) / library).exists():
            return (Path(directory),)
    try:
        ctypes.CDLL(library)
    except OSError:
        raise ServerError(
            f"the python backend needs {library}, which this Python does not include; "
            f"run: sudo apt-get install libpython{version}"
        ) from None
    return ()


def _require_numpy(stub: Path) -> None:
    """Raise ServerError if the models' processes would misread strings: a stub that was built before numpy 2 (with
    pybind11 before 2.12) reads garbage lengths with it, and ends at the first request or, worse, later under load."""
    found = importlib.metadata.version("numpy")
    if int(found.split(".")[0]) > 1 and stub.exists() and NUMPY_2 not in stub.read_bytes():
        raise ServerError(
            f"tritonserver's python backend needs numpy 1.26; this Python has {found}; "
            f"run: {sys.executable} -m pip install 'numpy<2'"
        )


def compile_library(directory: Path) -> Path | None:
    """Compile the library that tritonserver is started with, so that no shape of an input ends it, into `directory` and
    return its path; None, with a warning, if this machine cannot."""
    library = directory / "libinput_shapes.so"
    # Without the C library's files, which Debian has in another package than the compiler.
    command = [shutil.which("cc") or "gcc", "-O1", "-shared", "-fPIC", "-nostdlib", "-o", str(library)]
    try:
        subprocess.run(
            [*command, str(INPUT_SHAPES)], check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        logger.warning(
            "no C compiler for the check of inputs' shapes: whoever reaches the gRPC port can end the server with one "
            "message; let only callers you trust reach it, or run: apt-get install gcc (%s)",
            reason.strip().splitlines()[-1],
        )
        return None
    return library
