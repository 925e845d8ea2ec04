"""Streamed responses of another model of the same tritonserver, over its gRPC endpoint.

A BLS call would be shorter, but with Triton 2.51 a decoupled one can deadlock the process: the thread that starts it
holds the GIL while it waits for a mutex, and a thread that reads another call's response holds that mutex while it
waits for the GIL. Under load this happens sooner or later. Such a call also cannot be cancelled, and an error after the
first response is lost. Over gRPC all of that works.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.utils import np_to_triton_dtype

from cosyvoice_triton.addresses import ENDED_EARLY, channel_options
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.monitoring.environment import grpc_address
from cosyvoice_triton.triton_io.errors import exception_of


class Streams:
    """Streamed requests to `model`, any number at once, from one asyncio loop."""

    def __init__(self, model: str, outputs: Sequence[str]) -> None:
        """Make the streams. outputs: names of the outputs to request."""
        self._model = model
        self._outputs = [InferRequestedOutput(name) for name in outputs]
        self._address = grpc_address()
        self._connection: triton.InferenceServerClient | None = None  # created in the loop that uses it

    async def ask(
        self, inputs: Mapping[str, np.ndarray], parameters: Mapping[str, str]
    ) -> AsyncGenerator[dict[str, np.ndarray], None]:
        """Yield the outputs of each response as they come, without timeout; closing the generator cancels the request.

        Raises the exception that the model's error stands for, UnavailableError if the server does not answer.
        """
        if self._connection is None:
            self._connection = triton.InferenceServerClient(self._address, channel_args=channel_options(self._address))

        tensors = []
        for name, array in inputs.items():
            tensor = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
            tensors.append(tensor.set_data_from_numpy(array))

        async def requests() -> AsyncGenerator[dict[str, Any], None]:
            # The end of this generator half-closes the call: the server closes its side after the last response.
            yield {
                "model_name": self._model,
                "inputs": tensors,
                "outputs": self._outputs,
                "parameters": dict(parameters) or None,
            }

        responses = self._connection.stream_infer(requests())
        try:
            async for result, error in responses:
                if error is not None:
                    raise exception_of(self._model, error.message())
                outputs = {}
                for output in result.get_response().outputs:
                    outputs[output.name] = result.as_numpy(output.name)
                yield outputs
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            if error.details() == ENDED_EARLY:
                reason = "the server has ended the call before the request was sent: retry"
            raise UnavailableError(f"{self._model} at {self._address}: {reason}") from None
        finally:
            responses.cancel()

    async def aclose(self) -> None:
        """Close the connection if there is one."""
        if self._connection is not None:
            await self._connection.close()
