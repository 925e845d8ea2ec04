"""A network computed by onnxruntime."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from cosyvoice_triton.runtimes.network import Network, ShapeLimits

_TORCH = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16}
_ANY_SIZE = (0, 2**31 - 1)  # of a dynamic dimension
_NUMPY = {torch.float32: np.float32, torch.float16: np.float16}


class OnnxNetwork(Network):
    """An ONNX file in an inference session. `inputs`, `outputs`: dtypes by name.

    On the CPU tensors are passed without copying; on a GPU they stay there (IO binding). threads: of the session on the
    CPU, default: torch's number. ValueError: the file is missing or no ONNX network, or `device` is a GPU and this
    onnxruntime has no CUDA provider.
    """

    def __init__(self, path: str | Path, device: torch.device | str = "cpu", threads: int | None = None) -> None:
        self._device = torch.device(device)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads() if threads is None else threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # other models need the cores
        providers: list[str | tuple[str, dict[str, str]]] = ["CPUExecutionProvider"]
        if self._device.type == "cuda":
            if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
                raise ValueError(f"{path}: this onnxruntime has no CUDA provider; install onnxruntime-gpu")
            self._stream = torch.cuda.Stream(self._device)
            place = {"device_id": str(self._device.index or 0), "user_compute_stream": str(self._stream.cuda_stream)}
            providers.insert(0, ("CUDAExecutionProvider", place))
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers)
        except Exception as error:  # onnxruntime's own errors share no base class
            raise ValueError(f"{path}: onnxruntime cannot load it: {error}") from None
        self.inputs = {entry.name: _TORCH[entry.type] for entry in self._session.get_inputs()}
        self.outputs = {entry.name: _TORCH[entry.type] for entry in self._session.get_outputs()}
        sizes = {
            entry.name: [(size, size) if isinstance(size, int) else _ANY_SIZE for size in entry.shape]
            for entry in self._session.get_inputs()
        }
        least, most = ({name: tuple(of[end] for of in dims) for name, dims in sizes.items()} for end in (0, 1))
        self.limits = ShapeLimits(least, least, most)

    def run(self, inputs: Mapping[str, Tensor], stream: torch.cuda.Stream | None = None) -> dict[str, Tensor]:
        self.limits.check({name: tuple(x.shape) for name, x in inputs.items()})
        given = {name: inputs[name].to(dtype).contiguous() for name, dtype in self.inputs.items()}
        if self._device.type == "cpu":
            arrays = self._session.run(list(self.outputs), {name: x.numpy() for name, x in given.items()})
            return {name: torch.from_numpy(array) for name, array in zip(self.outputs, arrays, strict=True)}
        return self._run_bound(given, stream)

    def _run_bound(self, inputs: dict[str, Tensor], stream: torch.cuda.Stream | None) -> dict[str, Tensor]:
        caller = stream or torch.cuda.current_stream(self._device)
        index = self._device.index or 0
        binding = self._session.io_binding()
        for name, x in inputs.items():
            binding.bind_input(name, "cuda", index, _NUMPY[x.dtype], list(x.shape), x.data_ptr())
            x.record_stream(self._stream)
        for name in self.outputs:
            binding.bind_output(name, "cuda", index)
        self._stream.wait_stream(caller)
        self._session.run_with_iobinding(binding)
        with torch.cuda.stream(self._stream):  # copied: onnxruntime frees its outputs with the binding
            values = zip(self.outputs.items(), binding.get_outputs(), strict=True)
            outputs = {name: torch.as_tensor(_OnDevice(value, dtype)).clone() for (name, dtype), value in values}
        caller.wait_stream(self._stream)
        for x in outputs.values():
            x.record_stream(caller)
        return outputs


class _OnDevice:
    """Makes GPU memory of onnxruntime readable for torch."""

    def __init__(self, value: onnxruntime.OrtValue, dtype: torch.dtype) -> None:
        self._value = value
        self.__cuda_array_interface__ = {
            "shape": tuple(value.shape()),
            "typestr": np.dtype(_NUMPY[dtype]).str,
            "data": (value.data_ptr(), False),
            "version": 2,
        }
