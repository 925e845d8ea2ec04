"""Which tritonserver there is to run: the one inside the nvidia-pytriton wheel, or that of NVIDIA's image.

The wheel holds the server (2.51), the python backend, a stub for each Python version and the local response cache;
only their arrangement in one backend directory and the library path are missing. The image has all in place.
"""

import ctypes
import importlib.util
import platform
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

MIN_GLIBC = (2, 35)  # the wheel's platform tag: manylinux_2_35
IMAGE_ROOT = Path("/opt/tritonserver")  # where NVIDIA's images have it


class ServerError(RuntimeError):
    """The server cannot start here, or ended before it was ready; the message says what to do."""


@dataclass(frozen=True)
class Installation:
    """A tritonserver and what it needs.

    `stub`: the python backend's process, where it has to be put beside the backend first. `libraries`: directories
    that the loader does not search by itself.
    """

    binary: Path
    backends: Path
    caches: Path
    stub: Path | None = None
    libraries: tuple[Path, ...] = ()

    @classmethod
    def find(cls) -> "Installation":
        """The wheel of the running interpreter, else the image's; ServerError when there is neither."""
        spec = importlib.util.find_spec("pytriton")  # located, not imported: only its files are needed
        if spec is not None and spec.submodule_search_locations:
            return cls._of_wheel(Path(spec.submodule_search_locations[0]))
        if (binary := IMAGE_ROOT / "bin" / "tritonserver").exists():
            return cls(binary=binary, backends=IMAGE_ROOT / "backends", caches=IMAGE_ROOT / "caches")
        raise ServerError("tritonserver is not installed; run: make setup")

    @classmethod
    def _of_wheel(cls, package: Path) -> "Installation":
        _require_glibc()
        root = package / "tritonserver"
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
        if not stub.exists():
            raise ServerError(f"tritonserver has no stub for Python {version}; run: make clean setup PYTHON=python3.11")
        return cls(
            binary=root / "bin" / "tritonserver",
            backends=root / "backends",
            caches=root / "caches",
            stub=stub,
            libraries=(package.parent / "nvidia_pytriton.libs", *_libpython_directories(version)),
        )

    def backend_directory(self, work: Path) -> Path:
        """The directory for --backend-directory; made in `work` where the stub is not beside its backend yet."""
        if self.stub is None:
            return self.backends
        directory = work / "backends" / "python"
        directory.mkdir(parents=True)
        for part in (self.backends / "python").iterdir():
            if part.is_file():
                (directory / part.name).symlink_to(part)
        # A copy, because wheels are unpacked without the run bit on some installers.
        shutil.copy(self.stub, directory / self.stub.name)
        (directory / self.stub.name).chmod(0o755)
        return directory.parent


def _require_glibc() -> None:
    name, release = platform.libc_ver()
    if name != "glibc" or tuple(int(part) for part in release.split(".")[:2]) < MIN_GLIBC:
        needed = ".".join(map(str, MIN_GLIBC))
        raise ServerError(
            f"tritonserver needs glibc {needed} or newer, this machine has {name or 'another C library'} {release}; "
            "run: docker run -it --network host -v $PWD:/src -w /src python:3.11-bookworm make demo"
        )


def _libpython_directories(version: str) -> tuple[Path, ...]:
    """Where the shared libpython of this interpreter lies; empty if the loader finds it by itself."""
    library = f"libpython{version}.so.1.0"
    for directory in (sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib"):
        if directory and (Path(directory) / library).exists():
            return (Path(directory),)
    try:
        ctypes.CDLL(library)
    except OSError:
        raise ServerError(
            f"the python backend needs {library}, which this Python does not bring; "
            f"run: sudo apt-get install libpython{version}"
        ) from None
    return ()


def require_machine() -> tuple[Path, ...]:
    """Directories of the shared libpython; ServerError when the machine lacks it or a C library of the wheel's age."""
    _require_glibc()
    return _libpython_directories(f"{sys.version_info.major}.{sys.version_info.minor}")
