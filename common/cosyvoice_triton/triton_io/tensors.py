"""Read the inputs of a request and build the outputs of a response."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils  # noqa: TID251
from torch.utils.dlpack import to_dlpack


def read_all(request: Any, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Return the inputs among `names` that were sent, by name; without `names` all of them."""
    sent = {}
    for tensor in request.inputs():  # once: looking each name up makes objects of all of them every time
        if names is None or tensor.name() in names:
            sent[tensor.name()] = tensor.as_numpy()
    return sent


def require(request: Any, name: str) -> np.ndarray:
    """Return the input `name` as sent, with its batch dimension; ValueError if it was not sent."""
    if (tensor := pb_utils.get_input_tensor_by_name(request, name)) is None:
        raise ValueError(f"{name} is missing")
    array: np.ndarray = tensor.as_numpy()
    return array


def scalar(sent: Mapping[str, np.ndarray], name: str) -> Any:
    """Return the single element of the input `name` as a Python value; None if it is not among those `sent`."""
    array = sent.get(name)
    if array is None:
        return None
    if array.size != 1:
        raise ValueError(f"{name} must hold one value, not {array.size} (shape {list(array.shape)})")
    return array.reshape(-1)[0].item() if array.dtype != object else array.reshape(-1)[0]


def text(sent: Mapping[str, np.ndarray], name: str) -> str | None:
    """Return the single string of the input `name`, decoded from UTF-8; None if it is not among those `sent`."""
    value = scalar(sent, name)
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}") from None


def parameters(request: Any) -> dict[str, Any]:
    """Return the request parameters: strings, numbers and booleans by name."""
    return dict(json.loads(request.parameters() or "{}"))


def origin(request: Any) -> dict[str, Any]:
    """Say whose request it is: correlation_id (0 or "": none) with its flags start and end, and request_id."""
    flags = request.flags()
    return {
        "correlation_id": request.correlation_id(),
        "start": bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
        "end": bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
        "request_id": request.request_id(),
    }


def to_tensor(name: str, array: np.ndarray) -> Any:
    """Return `array` as a Triton tensor; strings as an object array of bytes or str.

    Numbers are passed by DLPack, because the backend's own constructor does not copy the data with numpy 2. They go
    through torch, because the backend renames the capsule to a name that numpy's destructor does not know.
    """
    if array.dtype == object or array.size == 0:  # the backend mistakes an empty DLPack tensor for a strided one
        return pb_utils.Tensor(name, array)
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = array.copy()
    # As a capsule: the backend would ask the tensor for one and for its device, in Python, 20 us for each tensor.
    return pb_utils.Tensor.from_dlpack(name, to_dlpack(torch.from_numpy(array)))


def to_response(outputs: Mapping[str, np.ndarray]) -> Any:
    return pb_utils.InferenceResponse(list(map(to_tensor, outputs.keys(), outputs.values())))
