"""A strict fake of the package `tensorrt` with only the parts that the library and tools.export.engines use.

It fails like the real one (False, None or an exception) for shapes outside the profile, addresses that were not set,
unknown names and plans of another machine. It raises where the behaviour of the real one is undefined: use of a context
by two threads at once. A plan contains its ONNX network, which onnxruntime computes, so that outputs are correct.

It was written from the docstrings of the real bindings; tests/assets/tensorrt_names.txt names their version.
"""

import ctypes
import enum
import importlib.machinery
import pickle
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnxruntime
from onnx import TensorProto

__version__ = "10.11.0.33"


class State:
    """The simulated machine and its failures, set by tests. `install` creates a new one for every test."""

    def __init__(self) -> None:
        self.machine = "NVIDIA Test 9.0"
        self.context_memory = 100  # number of contexts that fit into memory
        self.unsupported: set[str] = set()  # operators that the parser rejects
        self.build_fails = ""
        self.runs_fail = 0  # number of next executions that fail
        self.wrong_by = 0.0  # added to every output
        self.streams: dict[int, Any] = {}  # by handle: streams for asynchronous work; other handles run it immediately
        self.built: list[dict[str, Any]] = []
        self.contexts = 0


state = State()


class Dims(tuple):
    """Iterable like the real class."""


class Severity(enum.IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class _Overridable:
    def __init__(self) -> None:
        self._constructed = True


def _require(value: Any, kind: type) -> None:
    constructed = not issubclass(kind, _Overridable) or getattr(value, "_constructed", False)
    if not isinstance(value, kind) or not constructed:
        raise TypeError(f"incompatible arguments: {value!r} is no {kind.__name__} whose __init__ was called")


class ILogger(_Overridable):
    Severity = Severity


class IProgressMonitor(_Overridable):
    pass


class DataType(enum.Enum):
    FLOAT = TensorProto.FLOAT
    HALF = TensorProto.FLOAT16
    BF16 = TensorProto.BFLOAT16
    INT32 = TensorProto.INT32


class TensorIOMode(enum.Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class NetworkDefinitionCreationFlag(enum.IntEnum):
    STRONGLY_TYPED = 1


class ITensor:
    def __init__(self, value: onnx.ValueInfoProto) -> None:
        self.name = value.name
        self.shape = Dims(dim.dim_value if dim.HasField("dim_value") else -1 for dim in _dims(value))


class INetworkDefinition:
    def __init__(self, strongly_typed: bool) -> None:
        self._strongly_typed = strongly_typed
        self._model: onnx.ModelProto | None = None

    @property
    def num_inputs(self) -> int:
        return len(self._model.graph.input) if self._model else 0

    def get_input(self, index: int) -> ITensor:
        return ITensor(self._model.graph.input[index])


class ParserError:
    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text


class OnnxParser:
    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        _require(network, INetworkDefinition)
        _require(logger, ILogger)
        self._network = network
        self._errors: list[ParserError] = []

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> ParserError:
        return self._errors[index]

    def parse(self, model: bytes) -> bool:
        parsed = onnx.load_from_string(model)
        onnx.checker.check_model(parsed)
        unknown = {node.op_type for node in parsed.graph.node} & state.unsupported
        self._errors = [ParserError(f"no importer for operator {name}") for name in sorted(unknown)]
        self._network._model = None if unknown else parsed
        return not unknown


class IOptimizationProfile:
    def __init__(self) -> None:
        self._shapes: dict[str, tuple[Dims, ...]] = {}

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
        bounds = tuple(Dims(shape) for shape in (min, opt, max))
        if not all(0 <= a <= b <= c for a, b, c in zip(*bounds, strict=True)):
            raise ValueError(f"{input}: {bounds} is inconsistent")
        self._shapes[input] = bounds


class ITimingCache:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def serialize(self) -> memoryview:
        return memoryview(self._data or f"timings of {state.machine}".encode())


class IBuilderConfig:
    def __init__(self) -> None:
        self._profiles: list[IOptimizationProfile] = []
        self._cache: ITimingCache | None = None
        self._monitor: IProgressMonitor | None = None

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self._profiles.append(profile)
        return len(self._profiles) - 1 if profile._shapes else -1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache:
        return ITimingCache(serialized_timing_cache)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        _require(cache, ITimingCache)
        if cache._data and cache._data != f"timings of {state.machine}".encode() and not ignore_mismatch:
            return False
        self._cache = cache
        return True

    @property
    def progress_monitor(self) -> IProgressMonitor | None:
        return self._monitor

    @progress_monitor.setter
    def progress_monitor(self, monitor: IProgressMonitor) -> None:
        _require(monitor, IProgressMonitor)
        self._monitor = monitor


class Builder:
    def __init__(self, logger: ILogger) -> None:
        _require(logger, ILogger)
        self._logger = logger

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        return INetworkDefinition(bool(flags & 1 << int(NetworkDefinitionCreationFlag.STRONGLY_TYPED)))

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> memoryview | None:
        if problem := self._problem(network, config):
            self._logger.log(Severity.ERROR, problem)
            return None
        if not self._report(config._monitor):
            self._logger.log(Severity.WARNING, "the build was cancelled")
            return None
        plan = {
            "version": __version__,
            "machine": state.machine,
            "profile": {
                name: [tuple(shape) for shape in shapes] for name, shapes in config._profiles[0]._shapes.items()
            },
            "model": network._model.SerializeToString(),
        }
        state.built.append(plan | {"cache": config._cache and config._cache._data})
        return memoryview(pickle.dumps(plan))

    def _report(self, monitor: Any) -> bool:
        """Whether the monitor continues the build. Its exceptions are only logged, as in the real one."""
        if monitor is None:
            return True
        try:
            monitor.phase_start("Building Engine", None, 2)
            monitor.phase_start("Timing", "Building Engine", 1)
            proceed = monitor.step_complete("Timing", 0)
            monitor.phase_finish("Timing")
            proceed = proceed and monitor.step_complete("Building Engine", 0)
            monitor.phase_finish("Building Engine")
        except BaseException as error:
            self._logger.log(Severity.ERROR, f"Exception caught in step_complete(): {error}")
            return True
        return proceed

    def _problem(self, network: INetworkDefinition, config: IBuilderConfig) -> str:
        if state.build_fails or network._model is None:
            return state.build_fails or "the network is empty"
        if not network._strongly_typed:
            return "the fake supports strongly typed networks only"
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            bounds = config._profiles[0]._shapes.get(tensor.name) if config._profiles else None
            if bounds is None:
                return f"Input {tensor.name} is dynamic but has no optimization profile"
            for size, *sizes in zip(tensor.shape, *bounds, strict=True):
                if size >= 0 and set(sizes) != {size}:
                    return f"Input {tensor.name} has the static size {size}, its profile {sizes}"
        return ""


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        _require(logger, ILogger)
        self._logger = logger

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
        stream = state.streams.get(stream_handle)
        if stream is None:
            self._compute(addresses, shapes)
        else:
            stream.enqueue(set(addresses.values()), lambda: self._compute(addresses, shapes))
        return True

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


def _dims(value: onnx.ValueInfoProto) -> Any:
    return value.type.tensor_type.shape.dim


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
