"""A strict fake of what needs a driver in the package `tensorrt`: loading a plan and running it.

The tests build plans with the real library. This fake fails like the real one (False, None or an exception) for shapes
outside the profile, addresses that were not set, unknown names and plans of another machine. It raises where the
behaviour of the real one is undefined: use of a context by two threads at once. Its plans contain their ONNX network,
which onnxruntime computes, so that outputs are correct.

It was written from the docstrings of the real bindings; tests/assets/tensorrt_names.txt names their version.
"""

import ctypes
import enum
import importlib.machinery
import pickle
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnxruntime
from cosyvoice_triton.export import precision
from cosyvoice_triton.runtimes.workloads import Workload
from onnx import TensorProto

__version__ = "10.11.0.33"


class State:
    """The simulated machine and its failures, set by tests. `install` creates a new one for every test."""

    def __init__(self) -> None:
        self.machine = "NVIDIA Test 9.0"
        self.context_memory = 100  # number of contexts that fit into memory
        self.runs_fail = 0  # number of next executions that fail
        self.wrong_by = 0.0  # added to every output
        self.streams: dict[int, Any] = {}  # by handle: streams for asynchronous work; other handles run it immediately
        self.contexts = 0
        self.logger: ILogger | None = None
        self.pause = 0.0  # seconds that an execution takes
        self.running, self.most_at_once = 0, 0  # executions
        self.lock = threading.Lock()


state = State()


class Dims(tuple):
    """Iterable like the real class."""


class Severity(enum.IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class ILogger:
    Severity = Severity

    def __init__(self) -> None:
        self._constructed = True


def _logger(given: Any) -> ILogger:
    """The first logger that a process creates an object with: the real library ignores all others."""
    if not isinstance(given, ILogger) or not getattr(given, "_constructed", False):
        raise TypeError(f"incompatible arguments: {given!r} is no ILogger whose __init__ was called")
    state.logger = state.logger or given
    return state.logger


class DataType(enum.Enum):
    FLOAT = TensorProto.FLOAT
    HALF = TensorProto.FLOAT16
    BF16 = TensorProto.BFLOAT16
    INT32 = TensorProto.INT32


class TensorIOMode(enum.Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


def plan(path: Path, workload: Workload) -> bytes:
    """What the real builder makes of an ONNX file, for this fake: the network in the plan's precision, and its profile.

    tests/tools/test_build_engines.py and tests/accel/test_real_plans.py build with the real one.
    """
    data = precision.read(path, workload.precision)
    model = onnx.load_from_string(data)
    shapes = {
        value.name: [dim.dim_value if dim.HasField("dim_value") else -1 for dim in value.type.tensor_type.shape.dim]
        for value in model.graph.input
    }
    limits = workload.limits(shapes)
    profile = {name: [limits.least[name], limits.usual[name], limits.most[name]] for name in shapes}
    return pickle.dumps({"version": __version__, "machine": state.machine, "profile": profile, "model": data})


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        self._logger = _logger(logger)

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> "ICudaEngine | None":
        try:
            plan = pickle.loads(serialized_engine)
        except Exception:
            plan = {"version": None, "machine": None}
        for what, here in (("version", __version__), ("machine", state.machine)):
            if plan[what] != here:
                self._logger.log(Severity.ERROR, f"the engine plan file is of {what} {plan[what]}, expecting {here}")
                return None
        return ICudaEngine(plan, self._logger)


class ICudaEngine:
    def __init__(self, plan: dict[str, Any], logger: ILogger) -> None:
        model = onnx.load_from_string(plan["model"])
        self._profile = plan["profile"]
        self._logger = logger
        self._inputs = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
        self._outputs = {value.name: value.type.tensor_type.elem_type for value in model.graph.output}
        if TensorProto.BFLOAT16 in self._inputs.values():  # onnxruntime does not compute it on the CPU
            self._session: Any = onnx.reference.ReferenceEvaluator(model)
        else:
            self._session = onnxruntime.InferenceSession(plan["model"], providers=["CPUExecutionProvider"])

    @property
    def num_io_tensors(self) -> int:
        return len(self._inputs) + len(self._outputs)

    def get_tensor_name(self, index: int) -> str:
        return [*self._inputs, *self._outputs][index]

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType((self._inputs | self._outputs)[name])

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        known = name in self._inputs or name in self._outputs
        return (TensorIOMode.INPUT if name in self._inputs else TensorIOMode.OUTPUT) if known else TensorIOMode.NONE

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        assert profile_index == 0 and name in self._inputs
        return [Dims(shape) for shape in self._profile[name]]

    def create_execution_context(self) -> "IExecutionContext | None":
        if state.contexts >= state.context_memory:
            self._logger.log(Severity.ERROR, "Requested amount of GPU memory could not be allocated")
            return None
        return IExecutionContext(self)


class IExecutionContext:
    """Raises if two threads call methods at the same time, which is undefined in the real one."""

    def __init__(self, engine: ICudaEngine) -> None:
        self._state = state  # of the test that created it: an exception may keep the context alive until the next test
        self._state.contexts += 1
        self._engine = engine
        self._user = threading.Lock()
        self._profile: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def __del__(self) -> None:
        self._state.contexts -= 1

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._user.acquire(blocking=False):
            raise AssertionError("two threads use one execution context")
        try:
            yield
        finally:
            self._user.release()

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        with self._alone():
            self._profile = profile_index
            return profile_index == 0

    def set_input_shape(self, name: str, shape: Any) -> bool:
        with self._alone():
            bounds = self._engine._profile.get(name)
            if self._profile is None or bounds is None or len(shape) != len(bounds[0]):
                return self._refuse(f"setInputShape: {name} {shape}")
            if not all(low <= size <= high for low, size, high in zip(bounds[0], shape, bounds[2], strict=True)):
                return self._refuse(f"setInputShape: {name} {shape} is not in the profile {bounds[0]} to {bounds[2]}")
            self._shapes[name] = tuple(shape)
            return True

    def infer_shapes(self) -> list[str]:
        with self._alone():
            return [name for name in self._engine._inputs if name not in self._shapes]

    def get_tensor_shape(self, name: str) -> Dims:
        with self._alone():
            if name in self._engine._inputs:
                return Dims(self._shapes[name])
            zeros = {
                name: np.zeros(self._shapes[name], onnx.helper.tensor_dtype_to_np_dtype(kind))
                for name, kind in self._engine._inputs.items()
            }
            return Dims(self._engine._session.run([name], zeros)[0].shape)

    def set_tensor_address(self, name: str, memory: int) -> bool:
        with self._alone():
            if name not in self._engine._inputs | self._engine._outputs:
                return self._refuse(f"setTensorAddress: no tensor {name}")
            self._addresses[name] = memory
            return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        with self._alone():
            for name in (*self._engine._inputs, *self._engine._outputs):
                if not self._addresses.get(name):
                    return self._refuse(f"enqueueV3: the address of {name} is not set")
            if missing := [name for name in self._engine._inputs if name not in self._shapes]:
                return self._refuse(f"enqueueV3: the shapes of {missing} are not set")
            if state.runs_fail:
                state.runs_fail -= 1
                return self._refuse("enqueueV3: Cuda Runtime (an illegal memory access was encountered)")
            addresses, shapes = dict(self._addresses), dict(self._shapes)
            self._pause()
        stream = state.streams.get(stream_handle)
        if stream is None:
            self._compute(addresses, shapes)
        else:
            stream.enqueue(set(addresses.values()), lambda: self._compute(addresses, shapes))
        return True

    @staticmethod
    def _pause() -> None:
        with state.lock:
            state.running += 1
            state.most_at_once = max(state.most_at_once, state.running)
        time.sleep(state.pause)
        with state.lock:
            state.running -= 1

    def _compute(self, addresses: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        engine = self._engine
        feeds = {}
        for name, kind in engine._inputs.items():
            value = np.zeros(shapes[name], onnx.helper.tensor_dtype_to_np_dtype(kind))
            ctypes.memmove(value.ctypes.data, addresses[name], value.nbytes)
            feeds[name] = value
        for name, value in zip(engine._outputs, engine._session.run(list(engine._outputs), feeds), strict=True):
            value = np.ascontiguousarray(value + np.asarray(state.wrong_by, value.dtype))
            ctypes.memmove(addresses[name], value.ctypes.data, value.nbytes)

    def _refuse(self, why: str) -> bool:
        self._engine._logger.log(Severity.ERROR, why)
        return False


def classes() -> dict[str, type]:
    """The classes of the package, by name."""
    own = {name: value for name, value in globals().items() if isinstance(value, type) and value.__module__ == __name__}
    return {name: value for name, value in own.items() if name[0] != "_" and value is not State}


def install(monkeypatch: Any) -> State:
    """Replace `import tensorrt` by this fake during a test; returns the state that controls it."""
    global state
    state = State()
    module = types.ModuleType("tensorrt")
    module.__spec__ = importlib.machinery.ModuleSpec("tensorrt", None)
    module.__dict__.update(classes(), __version__=__version__)
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    return state
