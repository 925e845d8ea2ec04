"""A fake of what needs a driver in TensorRT: loading a plan and running it.

Its plans are pickles of an ONNX network and its profile, which onnxruntime computes.
"""

import ctypes
import enum
import importlib.machinery
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from cosyvoice_triton.export import precision
from cosyvoice_triton.runtimes.signatures import Workload
from onnx import TensorProto

DataType = enum.Enum("DataType", {"FLOAT": TensorProto.FLOAT, "HALF": TensorProto.FLOAT16})
TensorIOMode = enum.Enum("TensorIOMode", "INPUT OUTPUT")


class ILogger:
    Severity = enum.IntEnum("Severity", "INTERNAL_ERROR ERROR", start=0)


def plan(path: Path, workload: Workload) -> bytes:
    """Return what the real builder makes of an ONNX file, for this fake."""
    data = precision.read(path, workload.precision)
    shapes = {
        value.name: [dim.dim_value if dim.HasField("dim_value") else -1 for dim in value.type.tensor_type.shape.dim]
        for value in onnx.load_from_string(data).graph.input
    }
    return pickle.dumps((workload.limits(shapes), data))


class Runtime:
    def __init__(self, logger: ILogger) -> None: ...

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> "ICudaEngine":
        return ICudaEngine(*pickle.loads(serialized_engine))


class ICudaEngine:
    def __init__(self, profile: dict[str, Any], data: bytes) -> None:
        graph = onnx.load_from_string(data).graph
        self._profile = profile
        self._inputs, self._outputs = (
            {value.name: value.type.tensor_type.elem_type for value in values} for values in (graph.input, graph.output)
        )
        self._session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])

    @property
    def num_io_tensors(self) -> int:
        return len(self._inputs) + len(self._outputs)

    def get_tensor_name(self, index: int) -> str:
        return [*self._inputs, *self._outputs][index]

    def get_tensor_dtype(self, name: str) -> Any:
        return DataType((self._inputs | self._outputs)[name])

    def get_tensor_mode(self, name: str) -> Any:
        return TensorIOMode.INPUT if name in self._inputs else TensorIOMode.OUTPUT

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return self._profile[name]

    def create_execution_context(self) -> "IExecutionContext":
        return IExecutionContext(self)

    def _run(self, shapes: dict[str, tuple[int, ...]], fill: Callable[[str, np.ndarray], object]) -> list[np.ndarray]:
        feeds = {}
        for name, kind in self._inputs.items():
            feeds[name] = np.zeros(shapes[name], onnx.helper.tensor_dtype_to_np_dtype(kind))
            fill(name, feeds[name])
        return self._session.run(list(self._outputs), feeds)


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
        return [name for name in self._engine._inputs if name not in self._shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        outputs = self._engine._run(self._shapes, lambda name, zeros: None)
        return outputs[list(self._engine._outputs).index(name)].shape

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        def read(name: str, value: np.ndarray) -> None:
            ctypes.memmove(value.ctypes.data, self._addresses[name], value.nbytes)

        for name, value in zip(self._engine._outputs, self._engine._run(self._shapes, read), strict=True):
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
