"""A network computed by TensorRT, from a plan built ahead of serving (docs/gpu.md)."""

import logging
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.runtimes import editions, plans
from cosyvoice_triton.runtimes.contexts import ContextPool
from cosyvoice_triton.runtimes.network import Network, ShapeLimits
from cosyvoice_triton.runtimes.plans import Machine, PlanError
from cosyvoice_triton.runtimes.streams import WorkStream, current_on, stream_on
from cosyvoice_triton.runtimes.workloads import Workload

PROFILE = 0  # a plan has one

logger = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def log_of(trt: Any) -> Any:
    """The logger of all builders and runtimes, because TensorRT uses the first that it gets and ignores others.

    Its `reason()` is why the last call failed.
    """

    class Log(trt.ILogger):
        """Forwards TensorRT's messages to logging and keeps errors, since its calls only return that they failed."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._errors: deque[str] = deque(maxlen=4)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
                self._errors.append(message)
                logger.error("TensorRT: %s", message)
            elif severity == trt.ILogger.Severity.WARNING:
                logger.warning("TensorRT: %s", message)

        def reason(self) -> str:
            """The errors since the last call."""
            errors = "; ".join(self._errors)
            self._errors.clear()
            return errors or "TensorRT gave no reason"

    return Log()


class TensorRTNetwork(Network):
    """An engine and a pool of execution contexts. Thread-safe: each `run` uses a context of its own.

    Inputs are cast to the engine's types; outputs have the engine's types.
    """

    limits: ShapeLimits

    def __init__(
        self, engine: bytes, name: str, device: torch.device | str, *, contexts: int = 1, timeout: float = 5.0
    ) -> None:
        """engine: bytes of a plan built on such a machine. contexts: number of concurrent executions. timeout: seconds
        that a `run` waits for a context.

        PlanError if TensorRT refuses the engine, UnavailableError if there is no memory for the contexts.
        """
        trt = editions.required().load()
        self.name = name
        self._device = torch.device(device)
        self._timeout = timeout
        self._log = log_of(trt)
        with current_on(self._device):
            self._runtime = trt.Runtime(self._log)
            self._engine = self._runtime.deserialize_cuda_engine(engine)
        if self._engine is None:
            raise PlanError(f"TensorRT refuses the plan of {name}: {self._log.reason()}; remove it and build it again")
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        self._types = {tensor: _torch_type(trt, self._engine.get_tensor_dtype(tensor)) for tensor in names}
        modes = {tensor: self._engine.get_tensor_mode(tensor) for tensor in names}
        self._inputs = [tensor for tensor in names if modes[tensor] == trt.TensorIOMode.INPUT]
        self._outputs = [tensor for tensor in names if modes[tensor] == trt.TensorIOMode.OUTPUT]
        self.limits = self._profile_limits()
        self._nothing = torch.zeros(1, device=self._device)  # address of empty tensors, which must not be null
        streams = [stream_on(self._device) for _ in range(contexts)]
        self._pool = ContextPool(self._new_context, streams, self.limits)

    @classmethod
    def load(
        cls,
        workload: Workload,
        model_dir: str | Path,
        device: torch.device | str,
        *,
        contexts: int = 1,
        timeout: float = 5.0,
    ) -> "TensorRTNetwork":
        """Load the plan of `workload` that fits this machine.

        PlanError if there is none, ImportError if TensorRT is not installed.
        """
        editions.required()
        plan = plans.find(workload, model_dir, Machine.here(device))
        if plan.error is None:
            logger.warning("%s was never compared with its ONNX file, see docs/gpu.md", plan.path.name)
        return cls(plan.read(), f"{workload.onnx} ({workload.use})", device, contexts=contexts, timeout=timeout)

    def contexts(self) -> tuple[int, float]:
        return self._pool.size, self._pool.waited_seconds

    def run(self, inputs: Mapping[str, Tensor], stream: torch.cuda.Stream | None = None) -> dict[str, Tensor]:
        shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
        with self._pool.context(shapes, timeout=self._timeout) as slot, slot.stream.called_from(stream):
            tensors = {name: self._placed(name, tensor) for name, tensor in inputs.items()}
            outputs = self._bind(slot.context, tensors)
            slot.stream.follow((*tensors.values(), *outputs.values()))
            if not slot.context.execute_async_v3(slot.stream.handle):
                raise RuntimeError(f"{self.name}: TensorRT did not run: {self._log.reason()}")
        return outputs

    def _placed(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._types[name]).contiguous()

    def _bind(self, context: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Set shapes and addresses of all tensors; return the outputs, not computed yet."""
        for name, tensor in inputs.items():
            if not context.set_input_shape(name, tuple(tensor.shape)):
                raise RuntimeError(f"{self.name}: TensorRT refuses {name} {tuple(tensor.shape)}: {self._log.reason()}")
        if unknown := context.infer_shapes():
            raise RuntimeError(f"{self.name}: TensorRT cannot infer the shape of {', '.join(unknown)}")
        outputs = {
            name: torch.empty(tuple(context.get_tensor_shape(name)), dtype=self._types[name], device=self._device)
            for name in self._outputs
        }
        for name, tensor in (*inputs.items(), *outputs.items()):
            address = (tensor if tensor.numel() else self._nothing).data_ptr()
            if not context.set_tensor_address(name, address):
                raise RuntimeError(f"{self.name}: TensorRT refuses the address of {name}: {self._log.reason()}")
        return outputs

    def _new_context(self, stream: WorkStream) -> Any:
        with current_on(self._device):
            context = self._engine.create_execution_context()
        if context is None:
            raise UnavailableError(f"{self.name}: no memory for another TensorRT context: {self._log.reason()}")
        # Set explicitly: by default only the first context of an engine has a profile.
        if not context.set_optimization_profile_async(PROFILE, stream.handle):
            raise RuntimeError(f"{self.name}: TensorRT refuses its profile: {self._log.reason()}")
        return context

    def _profile_limits(self) -> ShapeLimits:
        bounds = {name: self._engine.get_tensor_profile_shape(name, PROFILE) for name in self._inputs}
        least, usual, most = ({name: tuple(shapes[kind]) for name, shapes in bounds.items()} for kind in range(3))
        return ShapeLimits(least, usual, most)


def _torch_type(trt: Any, kind: Any) -> torch.dtype:
    names = {"FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16}
    known = {getattr(trt.DataType, name): dtype for name, dtype in names.items()}
    if kind not in known:
        raise PlanError(f"a plan's tensor is of the type {kind}; this code passes {', '.join(names)} only")
    return known[kind]
