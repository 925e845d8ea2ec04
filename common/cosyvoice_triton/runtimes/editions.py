"""The editions of TensorRT: one Python interface in two packages, of which a process uses the first installed.

tensorrt       in NVIDIA's images; its plans work on the model of GPU that they were built on
tensorrt_rtx   from PyPI; its plans are built on any machine, for all GPUs of one compute capability
"""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

ANY_GPU = "any"


@dataclass(frozen=True)
class Edition:
    """package: what is imported. oldest: first major version that works. portable: plans are built ahead of time, for
    a compute capability instead of this machine's GPU."""

    name: str
    package: str
    oldest: int
    portable: bool

    def load(self) -> Any:
        """The package; ImportError if it is too old or cannot be loaded."""
        trt = importlib.import_module(self.package)
        if int(trt.__version__.split(".")[0]) < self.oldest:
            raise ImportError(f"{self.name} {trt.__version__} is too old: {self.oldest}.0 or newer is needed")
        return trt

    @property
    def version(self) -> str:
        return f"{self.name} {self.load().__version__}"


# 10 is the first version whose contexts share a profile and whose networks are strongly typed.
FULL = Edition("tensorrt", "tensorrt", oldest=10, portable=False)
RTX = Edition("tensorrt_rtx", "tensorrt_rtx_bindings", oldest=1, portable=True)


def installed() -> Edition | None:
    """The edition that this process uses."""
    return next((edition for edition in (FULL, RTX) if importlib.util.find_spec(edition.package)), None)


def required() -> Edition:
    """As `installed`; ImportError says what to install."""
    if (edition := installed()) is None:
        raise ImportError(
            "TensorRT is not installed; run in the image of Dockerfile.server, or: "
            "pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings"
        )
    return edition


def target(edition: Edition, capability: str) -> Any:
    """TensorRT's constant for a compute capability such as "8.9"; ValueError if it builds no plans for it here."""
    known = {}
    if edition.portable:
        members = edition.load().ComputeCapability.__members__.items()
        numbers = {name.removeprefix("SM"): value for name, value in members if name.startswith("SM")}
        known = {f"{number[:-1]}.{number[-1]}": value for number, value in numbers.items()}
    if capability not in known:
        raise ValueError(
            f"{edition.version} builds no plans for compute capability {capability}, only for "
            f"{', '.join(known) or 'the GPU of the machine that builds'}"
        )
    return known[capability]
