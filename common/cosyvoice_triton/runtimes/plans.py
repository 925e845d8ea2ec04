"""TensorRT plans on disk, each for one use of a network, one precision and one kind of GPU.

Plans are in the folder `tensorrt` next to the ONNX files, each beside a JSON file of what it was built from. A plan
without one, or of another ONNX file or other shapes, is never passed to TensorRT.
"""

import hashlib
import importlib
import importlib.util
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cosyvoice_triton.runtimes.signatures import Workload

FOLDER = "tensorrt"
# The editions of TensorRT have one Python interface. NVIDIA's images have the first, whose plans work on the model of
# GPU that they were built on; PyPI has the second, whose plans are for all GPUs of one compute capability.
FULL, RTX = "tensorrt", "tensorrt_rtx_bindings"


class PlanError(RuntimeError):
    """No plan may be loaded; the message says why."""


def installed() -> str | None:
    """Return the package of TensorRT that this process uses, if there is one."""
    return next((package for package in (FULL, RTX) if importlib.util.find_spec(package)), None)


def tensorrt() -> Any:
    """Import TensorRT. ImportError says what to install."""
    if (package := installed()) is None:
        raise ImportError(
            "TensorRT is not installed; run in the image of Dockerfile.server, or: "
            "pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings"
        )
    return importlib.import_module(package)


def capabilities() -> dict[str, Any]:
    """Return TensorRT's constants of the compute capabilities, such as "8.9", that plans can be built for anywhere."""
    if installed() != RTX:
        return {}
    known = tensorrt().ComputeCapability.__members__
    return {f"{name[2:-1]}.{name[-1]}": value for name, value in known.items() if name.startswith("SM")}


def machine(device: torch.device | str) -> str:
    """Name what a plan for this GPU depends on. ValueError without a GPU, ImportError without TensorRT."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        raise ValueError("there is no GPU: name the --capability of the one that will serve, or build there")
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    return target(capability) if installed() == RTX else _machine(f"{properties.name} {capability}")


def target(capability: str) -> str:
    """Name any machine with GPUs of a compute capability. ValueError if plans for it cannot be built here."""
    if capability not in capabilities():
        known = ", ".join(capabilities()) or "the GPU of the machine that builds"
        raise ValueError(f"{_machine('')}builds no plans for compute capability {capability}, only for {known}")
    return _machine(capability)


def _machine(gpu: str) -> str:
    return f"{installed()} {tensorrt().__version__} {gpu}"


@dataclass(frozen=True)
class Plan:
    """A plan that serving needs, built or not. built_from: what it depends on besides what its file name says."""

    path: Path
    built_from: dict[str, str]

    @classmethod
    def of(cls, workload: Workload, model_dir: str | Path, machine: str) -> "Plan":
        """Name the plan of `workload` for that machine. PlanError if its ONNX file is missing."""
        onnx = Path(model_dir) / workload.onnx
        if not onnx.is_file():
            raise PlanError(f"{onnx} is missing; export it as docs/gpu.md describes")
        name = re.sub(r"[^a-z0-9.]+", "-", f"{workload.use} {workload.precision} {machine}".lower())
        built_from = {
            "onnx": f"{workload.onnx} {hashlib.sha256(onnx.read_bytes()).hexdigest()}",
            "shapes": ", ".join(f"{size} {least}-{most}" for size, (least, _, most) in workload.profile.items()),
        }
        return cls(onnx.parent / FOLDER / f"{name}.plan", built_from)

    def problem(self) -> str:
        """Return why the plan cannot be loaded; empty if it can."""
        try:
            found = json.loads(self._record.read_text())
            if not self.path.is_file():
                return f"{self.path} is missing"
        except (OSError, ValueError):
            return f"{self.path} does not exist, or what it was built from is not recorded"
        wrong = [
            f"{what} {found.get(what)}, not {now}" for what, now in self.built_from.items() if found.get(what) != now
        ]
        return f"{self.path} was built for {'; '.join(wrong)}" if wrong else ""

    def read(self) -> bytes:
        """Return the plan's bytes. PlanError with the problem and its remedy."""
        if problem := self.problem():
            raise PlanError(f"{problem}; build it as docs/gpu.md describes")
        return self.path.read_bytes()

    def write(self, data: bytes) -> None:
        """Store the plan. Whatever interrupts it, a plan with a record is complete."""
        self.path.parent.mkdir(exist_ok=True)
        self._record.unlink(missing_ok=True)
        work = self.path.with_suffix(".work")
        work.write_bytes(data)
        os.replace(work, self.path)
        self._record.write_text(json.dumps(self.built_from, indent=1) + "\n")

    @property
    def _record(self) -> Path:
        return self.path.with_suffix(".json")
