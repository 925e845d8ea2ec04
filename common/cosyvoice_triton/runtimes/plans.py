"""TensorRT plans on disk: what each was built for, which of them this machine can load, and why not the others.

Plans are in the folder `tensorrt` next to the ONNX files, each with a JSON sidecar that says what it was built from. A
plan without a sidecar, or whose sidecar names another machine, is never passed to TensorRT.
"""

import hashlib
import json
import math
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from cosyvoice_triton.runtimes import editions
from cosyvoice_triton.runtimes.workloads import Profile, Span, Workload

FOLDER = "tensorrt"
_SIDECAR = ".json"


class PlanError(RuntimeError):
    """No plan may be loaded; the message says what differs."""


@dataclass(frozen=True)
class Machine:
    """What a plan depends on besides its network."""

    gpu: str  # its name, or ANY_GPU for the portable edition
    capability: str  # compute capability, such as "9.0"
    tensorrt: str  # edition and version

    @classmethod
    def here(cls, device: torch.device | str) -> "Machine":
        """This machine and one of its GPUs. What is missing is "none", which no plan fits."""
        edition = editions.installed()
        gpu, capability = "none", "none"
        if torch.cuda.is_available():
            if (torch.device(device).index or 0) >= torch.cuda.device_count():
                raise ValueError(f"there is no {device}: this machine has {torch.cuda.device_count()} GPU(s)")
            properties = torch.cuda.get_device_properties(device)
            gpu = editions.ANY_GPU if edition and edition.portable else properties.name
            capability = f"{properties.major}.{properties.minor}"
        return cls(gpu, capability, edition.version if edition else "none")

    @classmethod
    def ahead(cls, capability: str) -> "Machine":
        """A machine with GPUs of a compute capability, of which this one may have none. ValueError if plans for it
        cannot be built here, ImportError if TensorRT is not installed."""
        edition = editions.required()
        editions.target(edition, capability)
        return cls(editions.ANY_GPU, capability, edition.version)

    @property
    def file_name(self) -> str:
        """The machine as part of a file name."""
        gpu = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        return f"{gpu}.sm{self.capability.replace('.', '')}.{self.tensorrt.replace(' ', '')}"

    def __str__(self) -> str:
        return f"GPU {self.gpu}, compute capability {self.capability}, {self.tensorrt}"


@dataclass(frozen=True)
class Key:
    """Everything that a plan depends on, and the use it was built for."""

    machine: Machine
    use: str
    onnx: str
    onnx_sha256: str
    precision: str
    profile: Profile

    @classmethod
    def of(cls, workload: Workload, model_dir: Path, machine: Machine) -> "Key":
        """The key that the plan of `workload` needs; PlanError if its ONNX file is missing."""
        path = model_dir / workload.onnx
        if not path.is_file():
            raise PlanError(f"{path} is missing; export it as docs/gpu.md describes")
        return cls(machine, workload.use, workload.onnx, sha256_of(path), workload.precision, workload.profile)

    @property
    def file_name(self) -> str:
        profile = (f"{name}{span}" for name, span in self.profile.items())
        network = self.onnx.removesuffix(".onnx")
        parts = [network, self.use, *profile, self.precision, self.machine.file_name, self.onnx_sha256[:12], "plan"]
        return ".".join(parts)

    def differences(self, built: "Key") -> list[str]:
        """Why a plan built for the key `built` does not fit this key; empty if it fits."""
        pairs = [
            ("GPU", built.machine.gpu, "here", self.machine.gpu),
            ("compute capability", built.machine.capability, "here", self.machine.capability),
            ("TensorRT", built.machine.tensorrt, "here", self.machine.tensorrt),
            ("ONNX file", f"{built.onnx} {built.onnx_sha256[:12]}", "here", f"{self.onnx} {self.onnx_sha256[:12]}"),
            ("precision", built.precision, "wanted", self.precision),
        ]
        found = [f"{what}: built for {was}, {now} {wanted}" for what, was, now, wanted in pairs if was != wanted]
        for name in sorted(self.profile.keys() | built.profile.keys()):
            was, wanted = built.profile.get(name), self.profile.get(name)
            if was is None or wanted is None or not was.covers(wanted):
                found.append(f"{name}: built for {was}, serving needs {wanted}")
        return found


@dataclass(frozen=True)
class Plan:
    """A plan file and the content of its sidecar. error: of its outputs against its ONNX file, relative to their root
    mean square; None if it was never run, which is so for plans that were built ahead of time."""

    path: Path
    key: Key
    sha256: str
    built_seconds: float
    error: float | None

    def read(self) -> bytes:
        """The plan's bytes; PlanError if their checksum differs from the sidecar's."""
        data = self.path.read_bytes()
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise PlanError(
                f"{self.path} is damaged: it is not what its sidecar describes; remove it and build it again"
            )
        return data

    def withdraw(self) -> None:
        """Make sure that it is never loaded."""
        _sidecar(self.path).unlink()


def write(model_dir: Path, key: Key, data: bytes, built_seconds: float, error: float | None) -> Plan:
    """Store a plan that was built for `key`. A file of that name is replaced atomically."""
    folder = model_dir / FOLDER
    folder.mkdir(exist_ok=True)
    plan = Plan(folder / key.file_name, key, hashlib.sha256(data).hexdigest(), round(built_seconds, 1), error)
    _sidecar(plan.path).unlink(missing_ok=True)  # first: a plan without a sidecar is never loaded
    write_atomically(plan.path, data)
    try:
        entry = {name: value for name, value in asdict(plan).items() if name != "path"} | {"bytes": len(data)}
        write_atomically(_sidecar(plan.path), (json.dumps(entry, indent=1) + "\n").encode())
    except BaseException:
        plan.path.unlink()
        raise
    return plan


def survey(model_dir: Path) -> list[tuple[Path, Plan | None]]:
    """Every plan file of a model directory, with None instead of a Plan if its sidecar is missing or unreadable."""
    return [(path, _read_sidecar(path)) for path in sorted((model_dir / FOLDER).glob("*.plan"))]


def find(workload: Workload, model_dir: str | Path, machine: Machine) -> Plan:
    """The smallest plan that fits `workload` and `machine`; PlanError if none does. Hashes the ONNX file."""
    model_dir = Path(model_dir)
    wanted = Key.of(workload, model_dir, machine)
    plans = [plan for _, plan in survey(model_dir) if plan is not None and plan.key.use == workload.use]
    if fitting := [plan for plan in plans if not wanted.differences(plan.key)]:
        return min(fitting, key=lambda plan: math.prod(max(1, span.most) for span in plan.key.profile.values()))
    problem = "there is none"
    if plans:
        nearest = min(plans, key=lambda plan: len(wanted.differences(plan.key)))
        problem = f"{nearest.path.name} does not fit: {'; '.join(wanted.differences(nearest.key))}"
    remedy = "build it as docs/gpu.md describes" + (f", with {workload.options}" if workload.options else "")
    raise PlanError(f"no TensorRT plan for {workload.onnx} ({workload.use}): {problem}; {remedy}")


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that `path` holds all of `data`, or what it held before."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it readable for its owner only; the server may be another user
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def sha256_of(path: Path) -> str:
    """SHA-256 of a file; cached in the process until the file changes."""
    status = path.stat()
    return _sha256(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=32)
def _sha256(path: Path, modified: int, size: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + _SIDECAR)


def _read_sidecar(path: Path) -> Plan | None:
    try:
        entry: dict[str, Any] = json.loads(_sidecar(path).read_text())
        fields = entry["key"]
        profile = {name: Span(**span) for name, span in fields["profile"].items()}
        key = Key(**(fields | {"machine": Machine(**fields["machine"]), "profile": profile}))
        return Plan(path, key, entry["sha256"], entry["built_seconds"], entry["error"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
