"""A network computed by TensorRT, from a plan built ahead of serving (docs/gpu.md)."""

from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from cosyvoice_triton.runtimes import plans
from cosyvoice_triton.runtimes.network import Network, ShapeLimits
from cosyvoice_triton.runtimes.plans import Plan, PlanError
from cosyvoice_triton.runtimes.signatures import Workload

PROFILE = 0  # a plan has one
_TYPES = {"FLOAT": torch.float32, "HALF": torch.float16}


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
        """Load the bytes of a plan for this machine. PlanError if TensorRT refuses it, RuntimeError without memory."""
        trt = plans.tensorrt()
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
                raise PlanError(f"TensorRT refuses the plan of {name}: {self._log.reason()}; build it again")
            self._context = self._engine.create_execution_context()
        if self._context is None:
            raise RuntimeError(f"{name}: no memory for a TensorRT context: {self._log.reason()}")
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        known = {getattr(trt.DataType, kind): dtype for kind, dtype in _TYPES.items()}
        self._types = {tensor: known[self._engine.get_tensor_dtype(tensor)] for tensor in names}
        modes = {tensor: self._engine.get_tensor_mode(tensor) for tensor in names}
        self._outputs = [tensor for tensor in names if modes[tensor] == trt.TensorIOMode.OUTPUT]
        inputs = [tensor for tensor in names if modes[tensor] == trt.TensorIOMode.INPUT]
        bounds = {tensor: self._engine.get_tensor_profile_shape(tensor, PROFILE) for tensor in inputs}
        least, usual, most = ({name: tuple(shapes[kind]) for name, shapes in bounds.items()} for kind in range(3))
        self.limits = ShapeLimits(least, usual, most)
        self._nothing = torch.zeros(1, device=self._device)  # address of empty tensors, which must not be null

    @classmethod
    def load(cls, workload: Workload, model_dir: str | Path, device: torch.device | str) -> "TensorRTNetwork":
        """Load the plan of `workload`. PlanError if none fits this machine, ImportError without TensorRT."""
        plan = Plan.of(workload, model_dir, plans.machine(device))
        return cls(plan.read(), f"{workload.onnx} ({workload.use})", device)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.limits.check({name: tuple(tensor.shape) for name, tensor in inputs.items()})
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
