"""A fake of what needs a driver in TensorRT: loading a plan and running it.

Its plans are pickles of an ONNX network and its profile, which onnxruntime computes.
"""

import ctypes
import enum
import importlib.machinery
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from cosyvoice_triton.export import precision
from cosyvoice_triton.runtimes.workloads import Workload
from onnx import TensorProto


class DataType(enum.Enum):
    FLOAT = TensorProto.FLOAT
    HALF = TensorProto.FLOAT16


class TensorIOMode(enum.Enum):
    INPUT = 1
    OUTPUT = 2


class ILogger:
    class Severity(enum.IntEnum):
        INTERNAL_ERROR = 0
        ERROR = 1

    def __init__(self) -> None: ...

    def log(self, severity: Severity, msg: str) -> None: ...


def plan(path: Path, workload: Workload) -> bytes:
    """Return what the real builder makes of an ONNX file, for this fake."""
    data = precision.read(path, workload.precision)
    shapes = {
        value.name: [dim.dim_value if dim.HasField("dim_value") else -1 for dim in value.type.tensor_type.shape.dim]
        for value in onnx.load_from_string(data).graph.input
    }
    limits = workload.limits(shapes)
    return pickle.dumps(({name: [limits.least[name], limits.usual[name], limits.most[name]] for name in shapes}, data))


class Runtime:
    def __init__(self, logger: ILogger) -> None: ...

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> "ICudaEngine":
        return ICudaEngine(*pickle.loads(serialized_engine))


class ICudaEngine:
    def __init__(self, profile: dict[str, Any], data: bytes) -> None:
        graph = onnx.load_from_string(data).graph
        self.profile = profile
        self.inputs = {value.name: value.type.tensor_type.elem_type for value in graph.input}
        self.outputs = {value.name: value.type.tensor_type.elem_type for value in graph.output}
        self.session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])

    @property
    def num_io_tensors(self) -> int:
        return len(self.inputs) + len(self.outputs)

    def get_tensor_name(self, index: int) -> str:
        return [*self.inputs, *self.outputs][index]

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType((self.inputs | self.outputs)[name])

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return self.profile[name]

    def create_execution_context(self) -> "IExecutionContext":
        return IExecutionContext(self)


class IExecutionContext:
    wrong_by = 0.0  # added to every output

    def __init__(self, engine: ICudaEngine) -> None:
        self._engine = engine
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._shapes[name] = shape
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name in self._engine.inputs if name not in self._shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        kinds = self._engine.inputs.items()
        zeros = {name: np.zeros(self._shapes[name], onnx.helper.tensor_dtype_to_np_dtype(kind)) for name, kind in kinds}
        return self._engine.session.run([name], zeros)[0].shape

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        engine = self._engine
        feeds = {}
        for name, kind in engine.inputs.items():
            feeds[name] = np.zeros(self._shapes[name], onnx.helper.tensor_dtype_to_np_dtype(kind))
            ctypes.memmove(feeds[name].ctypes.data, self._addresses[name], feeds[name].nbytes)
        for name, value in zip(engine.outputs, engine.session.run(list(engine.outputs), feeds), strict=True):
            value = np.ascontiguousarray(value + np.asarray(self.wrong_by, value.dtype))
            ctypes.memmove(self._addresses[name], value.ctypes.data, value.nbytes)
        return True


CLASSES = (DataType, TensorIOMode, ILogger, Runtime, ICudaEngine, IExecutionContext)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `import tensorrt` by this fake during a test."""
    module = types.ModuleType("tensorrt")
    module.__spec__ = importlib.machinery.ModuleSpec("tensorrt", None)
    module.__dict__.update({kind.__name__: kind for kind in CLASSES}, __version__="10.11.0.33")
    monkeypatch.setitem(sys.modules, "tensorrt", module)
