"""Streamed answers of another model of the same tritonserver, over its gRPC door.

A call between models would be shorter, but with Triton 2.51 a decoupled one is a danger to the whole process. A thread
that begins such a call keeps Python's lock while it waits for a mutex, and a thread that reads another's answer keeps a
mutex while it waits for Python's lock: under load both stop sooner or later, and everything with them. Nor can it be
cancelled, and an error after the first response is lost. Over gRPC all of that works.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.utils import np_to_triton_dtype

from common.errors import UnavailableError
from common.process.environment import ModelEnvironment
from common.triton_io.errors import exception_of


class Streams:
    """Streamed requests to `model`, any number at once, of one asyncio loop."""

    def __init__(self, model: str, outputs: Sequence[str]) -> None:
        """`outputs`: of each response, those that are wanted."""
        self._model = model
        self._outputs = [InferRequestedOutput(name) for name in outputs]
        self._address = ModelEnvironment.read().grpc_address
        self._connection: triton.InferenceServerClient | None = None  # made in the loop that uses it

    async def ask(
        self, inputs: Mapping[str, np.ndarray], parameters: Mapping[str, str]
    ) -> AsyncGenerator[dict[str, np.ndarray], None]:
        """The outputs of each response as they arrive; the caller bounds the waiting, and leaving early cancels all.

        Raises what the model's error says, UnavailableError where the server does not answer.
        """
        if self._connection is None:
            self._connection = triton.InferenceServerClient(self._address)

        async def requests() -> AsyncGenerator[dict[str, Any], None]:
            # Its end half-closes the call: the server closes its side after the last response.
            yield {
                "model_name": self._model,
                "inputs": _tensors(inputs),
                "outputs": self._outputs,
                "parameters": dict(parameters) or None,
            }

        responses = self._connection.stream_infer(requests())
        try:
            async for result, error in responses:
                if error is not None:
                    raise exception_of(self._model, error.message())
                yield {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(
                f"{self._model} at {self._address}: {error.code().name}: {error.details()}"
            ) from None
        finally:
            responses.cancel()

    async def aclose(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            await self._connection.close()


def _tensors(inputs: Mapping[str, np.ndarray]) -> list[InferInput]:
    tensors = []
    for name, array in inputs.items():
        tensor = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensors.append(tensor.set_data_from_numpy(array))
    return tensors
