"""A strict fake of triton_python_backend_utils: calls that the real one would refuse or misread raise immediately."""

import json
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2


def _reads(attribute: str) -> Callable[[Any], Any]:
    """A method that returns an attribute, as the real classes have them."""
    return lambda self: getattr(self, attribute)


class TritonModelException(RuntimeError):  # noqa: N818 - the name in the real module
    """Raised by the backend on misuse."""


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        assert isinstance(message, str)
        self._message, self._code = message, code

    message, code = _reads("_message"), _reads("_code")


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        if array.dtype != object and array.size:
            raise TritonModelException(f"{name}: with numpy 2 the real constructor reads no bytes; use from_dlpack")
        self._name, self._array = name, array

    @classmethod
    def from_dlpack(cls, name: str, source: object) -> "Tensor":
        """`source`: a torch tensor, or a capsule of one."""
        given = torch.from_dlpack(source)
        if not given.is_contiguous():
            raise TritonModelException(f"{name}: the real backend takes contiguous torch tensors only")
        tensor = cls.__new__(cls)
        tensor._name, tensor._array = name, given.numpy()
        return tensor

    name, as_numpy = _reads("_name"), _reads("_array")

    def is_cpu(self) -> bool:
        return True


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        assert all(isinstance(tensor, Tensor) for tensor in output_tensors or [])
        self._tensors, self._error = list(output_tensors or []), error

    output_tensors, error = _reads("_tensors"), _reads("_error")

    def has_error(self) -> bool:
        return self._error is not None

    def arrays(self) -> dict[str, np.ndarray]:
        """For tests: the outputs by name."""
        assert self._error is None, self._error.message()
        return {tensor.name(): tensor.as_numpy() for tensor in self._tensors}


class ResponseSender:
    """Record responses; refuse any after the final one, and a second one of a model that is not decoupled."""

    def __init__(self, decoupled: bool) -> None:
        self.responses: list[InferenceResponse] = []
        self.final = False
        self.cancelled = False
        self.cancellation_checked_after_final = False  # which crashes Triton 2.51
        self._decoupled = decoupled

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self.final:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if response is not None:
            assert isinstance(response, InferenceResponse)
            self.responses.append(response)
        if not self._decoupled and (response is None or not flags):
            raise TritonModelException("a model that is not decoupled sends one response, which is the final one")
        self.final = bool(flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        self.cancellation_checked_after_final |= self.final
        return self.cancelled


Callee = Callable[["InferenceRequest"], InferenceResponse | Iterable[InferenceResponse]]

# The models that requests can call, by name; set by tests.
models: dict[str, Callee] = {}


class InferenceRequest:
    """A request from a client (built by `from_client`) or to another model, as the library builds it."""

    def __init__(
        self,
        *,
        model_name: str = "",
        requested_output_names: list[str] | None = None,
        inputs: list[Tensor],
        request_id: str = "",
        correlation_id: int = 0,
        flags: int = 0,
        parameters: dict[str, str | int | bool] | None = None,
    ) -> None:
        assert all(isinstance(tensor, Tensor) for tensor in inputs)
        for key, value in (parameters or {}).items():
            if not isinstance(key, str) or not isinstance(value, (str, int, bool)):
                raise TritonModelException(f"parameter {key!r}: the real backend takes str, int and bool only")
        self._model, self._inputs, self._id = model_name, inputs, request_id
        self._outputs = requested_output_names or []
        self._correlation_id, self._flags = correlation_id, flags
        self._parameters = json.dumps(parameters) if parameters else ""
        self.declared: frozenset[str] | None = None
        self.sender = ResponseSender(decoupled=False)

    @classmethod
    def from_client(
        cls,
        inputs: Mapping[str, np.ndarray],
        *,
        parameters: Mapping[str, Any] | None = None,
        decoupled: bool = False,
        declared: frozenset[str] | None = None,
        **identity: Any,
    ) -> "InferenceRequest":
        """`declared`: the inputs of config.pbtxt; asking for another one fails the test."""
        tensors = []
        for name, array in inputs.items():
            tensors.append(Tensor(name, np.empty(0, object)))
            tensors[-1]._array = array
        request = cls(inputs=tensors, **identity)
        request._parameters = json.dumps(parameters) if parameters else ""
        request.declared = declared
        request.sender = ResponseSender(decoupled)
        return request

    inputs, parameters, request_id, flags = _reads("_inputs"), _reads("_parameters"), _reads("_id"), _reads("_flags")
    correlation_id, model_name = _reads("_correlation_id"), _reads("_model")
    requested_output_names, get_response_sender = _reads("_outputs"), _reads("sender")

    def exec(self) -> InferenceResponse:
        if self._model not in models:
            raise TritonModelException(f"Failed for execute the inference request. Model '{self._model}' is not ready.")
        answer = models[self._model](self)
        assert isinstance(answer, InferenceResponse), "a decoupled model is called over gRPC"
        return answer


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    assert request.declared is None or name in request.declared, f"{name!r} is not an input of the model's config"
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def as_module() -> types.ModuleType:
    """This file as a module with the name that models import."""
    module = types.ModuleType("triton_python_backend_utils")
    module.__dict__.update({key: value for key, value in globals().items() if not key.startswith("__")})
    return module
