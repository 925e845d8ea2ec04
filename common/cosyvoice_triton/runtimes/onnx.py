"""A network computed by onnxruntime on the CPU."""

from collections.abc import Mapping
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor

from cosyvoice_triton.runtimes.network import Network, check_shapes

_TORCH = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16}
_ANY_SIZE = (0, 2**31 - 1)  # of a dynamic dimension


class OnnxNetwork(Network):
    """An ONNX file in an inference session; tensors are passed without copying. `inputs`, `outputs`: dtypes by name.

    threads: of the session, default: torch's number. ValueError if the file is missing or no ONNX network.
    """

    def __init__(self, path: str | Path, threads: int | None = None) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads() if threads is None else threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # other models need the cores
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's own errors share no base class
            raise ValueError(f"{path}: onnxruntime cannot load it: {error}") from None
        self.inputs = {entry.name: _TORCH[entry.type] for entry in self._session.get_inputs()}
        self.outputs = {entry.name: _TORCH[entry.type] for entry in self._session.get_outputs()}
        sizes = {
            entry.name: [(size, size) if isinstance(size, int) else _ANY_SIZE for size in entry.shape]
            for entry in self._session.get_inputs()
        }
        ends = {name: [tuple(of[end] for of in dims) for end in (0, 1)] for name, dims in sizes.items()}
        self.limits = {name: (least, least, most) for name, (least, most) in ends.items()}

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        check_shapes(self.limits, inputs)
        given = {name: inputs[name].to(dtype).contiguous().numpy() for name, dtype in self.inputs.items()}
        arrays = self._session.run(list(self.outputs), given)
        return {name: torch.from_numpy(array) for name, array in zip(self.outputs, arrays, strict=True)}
