"""A network computed by TensorRT, from a plan built ahead of serving (docs/gpu.md).

A plan is for one use of a network, one precision and one kind of GPU. Plans are in the folder `tensorrt` next to the
ONNX files. Their names say what they were built from: one of another ONNX file or other shapes is never passed to
TensorRT.
"""

import hashlib
import importlib
import importlib.util
import json
import os
import re
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from cosyvoice_triton.runtimes.network import Network, check_shapes
from cosyvoice_triton.runtimes.signatures import Workload

FOLDER = "tensorrt"
# The editions of TensorRT have one Python interface. NVIDIA's images have the first, whose plans work on the model of
# GPU that they were built on; PyPI has the second, whose plans are for all GPUs of one compute capability.
FULL, RTX = "tensorrt", "tensorrt_rtx_bindings"
PROFILE = 0  # a plan has one
_TYPES = {"FLOAT": torch.float32, "HALF": torch.float16}


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


def plan_file(workload: Workload, model_dir: str | Path, machine: str) -> Path:
    """Return where the plan of `workload` for that machine is, or would be. The end of its name is a digest of the ONNX
    file and the shapes. RuntimeError if that file is missing."""
    onnx = Path(model_dir) / workload.onnx
    if not onnx.is_file():
        raise RuntimeError(f"{onnx} is missing; export it as docs/gpu.md describes")
    built_from = hashlib.sha256(onnx.read_bytes())
    built_from.update(json.dumps(dict(workload.profile), sort_keys=True).encode())
    about = f"{workload.use} {workload.precision} {machine} {built_from.hexdigest()[:16]}"
    return onnx.parent / FOLDER / f"{re.sub(r'[^a-z0-9.]+', '-', about.lower())}.plan"


def read_plan(path: Path) -> bytes:
    """Return a plan's bytes. RuntimeError with the problem and its remedy if there is none."""
    if path.is_file():
        return path.read_bytes()
    problem = f"{path} does not exist"
    if others := _outdated(path):
        problem += f", and {others[0].name} was built from another ONNX file or for other shapes"
    raise RuntimeError(f"{problem}; build it as docs/gpu.md describes")


def write_plan(path: Path, data: bytes) -> None:
    """Store a plan in place of outdated ones. Whatever interrupts it, the plan is complete or not there."""
    path.parent.mkdir(exist_ok=True)
    work = path.with_suffix(".work")
    work.write_bytes(data)
    os.replace(work, path)
    for other in _outdated(path):
        other.unlink()


def _outdated(path: Path) -> list[Path]:
    """Return the plans that differ from this one in nothing but what they were built from."""
    return sorted(other for other in path.parent.glob(f"{path.stem.rpartition('-')[0]}-*.plan") if other != path)


@lru_cache(maxsize=1)
def log_of(trt: Any) -> Any:
    """Return the logger of all builders and runtimes, because TensorRT uses the first that it gets and ignores others.

    Its `reason()` is why the last call failed: TensorRT's calls only return that they did.
    """

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._errors: deque[str] = deque(maxlen=4)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
                self._errors.append(message)

        def reason(self) -> str:
            """Return the errors since the last call."""
            errors = "; ".join(self._errors)
            self._errors.clear()
            return errors or "TensorRT gave no reason"

    return Log()


class TensorRTNetwork(Network):
    """An engine with one execution context, which calls use in turn, on a CUDA stream of its own.

    Inputs are cast to the engine's types; outputs have the engine's types.
    """

    def __init__(self, engine: bytes, name: str, device: torch.device | str) -> None:
        """Load the bytes of a plan for this machine. RuntimeError if TensorRT refuses it, or without memory."""
        trt = tensorrt()
        self.name = name
        self._device = torch.device(device)
        self._log = log_of(trt)
        self._lock = Lock()
        on_gpu = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None
        with torch.cuda.device(self._device) if on_gpu else nullcontext():
            self._runtime = trt.Runtime(self._log)
            self._engine = self._runtime.deserialize_cuda_engine(engine)
            if self._engine is None:
                raise RuntimeError(f"TensorRT refuses the plan of {name}: {self._log.reason()}; build it again")
            self._context = self._engine.create_execution_context()
        if self._context is None:
            raise RuntimeError(f"{name}: no memory for a TensorRT context: {self._log.reason()}")
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        known = {getattr(trt.DataType, kind): dtype for kind, dtype in _TYPES.items()}
        self._types = {tensor: known[self._engine.get_tensor_dtype(tensor)] for tensor in names}
        modes = {tensor: self._engine.get_tensor_mode(tensor) for tensor in names}
        self._outputs = [tensor for tensor in names if modes[tensor] == trt.TensorIOMode.OUTPUT]
        inputs = [tensor for tensor in names if modes[tensor] == trt.TensorIOMode.INPUT]
        bounds = {tensor: map(tuple, self._engine.get_tensor_profile_shape(tensor, PROFILE)) for tensor in inputs}
        self.limits = {tensor: (least, usual, most) for tensor, (least, usual, most) in bounds.items()}
        self._nothing = torch.zeros(1, device=self._device)  # address of empty tensors, which must not be null

    @classmethod
    def load(cls, workload: Workload, model_dir: str | Path, device: torch.device | str) -> "TensorRTNetwork":
        """Load the plan of `workload`. RuntimeError if none fits this machine, ImportError without TensorRT."""
        plan = read_plan(plan_file(workload, model_dir, machine(device)))
        return cls(plan, f"{workload.onnx} ({workload.use})", device)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        check_shapes(self.limits, inputs)
        given = {name: x.to(self._device, self._types[name]).contiguous() for name, x in inputs.items()}
        with self._lock:
            outputs = self._bind(given)
            if self._stream is None:
                self._execute(0)
                return outputs
            caller = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(caller)
            for tensor in (*given.values(), *outputs.values()):
                tensor.record_stream(self._stream)  # their memory is not reused before the work is done
            try:
                self._execute(self._stream.cuda_stream)
            finally:
                caller.wait_stream(self._stream)
        return outputs

    def _execute(self, stream: int) -> None:
        self._require(self._context.execute_async_v3(stream), "did not run")

    def _bind(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Set shapes and addresses of all tensors; return the outputs, not computed yet."""
        for name, tensor in inputs.items():
            shape = tuple(tensor.shape)
            self._require(self._context.set_input_shape(name, shape), f"refuses {name} {shape}")
        self._require(not self._context.infer_shapes(), "cannot infer the shapes of its outputs")
        outputs = {
            name: torch.empty(tuple(self._context.get_tensor_shape(name)), dtype=self._types[name], device=self._device)
            for name in self._outputs
        }
        for name, tensor in (*inputs.items(), *outputs.items()):
            address = (tensor if tensor.numel() else self._nothing).data_ptr()
            self._require(self._context.set_tensor_address(name, address), f"refuses the address of {name}")
        return outputs

    def _require(self, done: bool, problem: str) -> None:
        """Raise RuntimeError unless a call of TensorRT succeeded."""
        if not done:
            raise RuntimeError(f"{self.name}: TensorRT {problem}: {self._log.reason()}")
