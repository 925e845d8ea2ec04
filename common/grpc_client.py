"""Requests to the speech models over gRPC, asyncio: one at a time, streamed or in one piece.

A connection carries any number of requests at once; each belongs to the task that awaits it and is cancelled with it.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.grpc import InferInput
from tritonclient.utils import InferenceServerException

from common import client as speech

CONNECT_SECONDS = 10.0
_WITH_STATUS = {"triton_grpc_error": "true"}  # an error of a stream ends the call with a status, not only with words


async def synthesize(
    server: str, model: str, request: speech.Utterance, mode: str = "streaming", timeout: float = 60.0
) -> speech.Speech:
    """One request over its own connection; cancelled with the task that awaits it.

    server: host:port. mode: "streaming" or "offline". timeout: seconds until the answer must be complete.
    ClientError for everything that goes wrong.
    """
    async with triton.InferenceServerClient(server) as connection:
        await require_model(connection, server, model, mode)
        recorder = speech.Recorder()
        try:
            if mode == "offline":
                recorder.add(await complete(connection, model, request, timeout))
            else:
                async for waveform in chunks(connection, model, request, timeout):
                    recorder.add(waveform)
        except InferenceServerException as error:
            raise explained(error.status(), error.message(), server, timeout) from None
        except grpc.aio.AioRpcError as error:
            raise explained(str(error.code()), error.details(), server, timeout) from None
    return recorder.finish()


async def require_model(connection: triton.InferenceServerClient, server: str, model: str, mode: str) -> None:
    """ClientError unless `model` is ready and can answer in this mode."""
    try:
        if not await connection.is_model_ready(model, client_timeout=CONNECT_SECONDS):
            raise speech.not_served(server, model)
        answer = await connection.get_model_config(model, client_timeout=CONNECT_SECONDS)
    except InferenceServerException as error:
        raise speech.unreachable(server, error.message()) from None
    if mode == "offline" and answer.config.model_transaction_policy.decoupled:
        raise speech.streams_only(model)


async def complete(
    connection: triton.InferenceServerClient, model: str, request: speech.Utterance, timeout: float
) -> np.ndarray | None:
    """The waveform of an offline request, (1, N) or (N,)."""
    inputs = request.tensors(InferInput)
    result = await connection.infer(model, inputs, client_timeout=timeout, parameters=request.parameters or None)
    return speech.waveform_of(result)


async def chunks(
    connection: triton.InferenceServerClient, model: str, request: speech.Utterance, timeout: float
) -> AsyncGenerator[np.ndarray | None, None]:
    """The waveforms of a streaming request as they arrive; closing the iterator cancels the request.

    AioRpcError or InferenceServerException carries the server's error. The requests end after the first, which
    half-closes the call: the server closes its side once it has sent that request's final response, so no mark of the
    end is needed.
    """

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": model,
            "inputs": request.tensors(InferInput),
            "parameters": request.parameters or None,
        }

    responses = connection.stream_infer(requests(), stream_timeout=timeout, headers=_WITH_STATUS)
    try:
        async for result, error in responses:
            if error is not None:
                raise error
            yield speech.waveform_of(result)
    finally:
        responses.cancel()


def explained(status: str | None, message: str | None, server: str, timeout: float) -> speech.ClientError:
    """What a failed call means, for the person who made it; `status` and `message` as gRPC gives them."""
    if status == str(grpc.StatusCode.DEADLINE_EXCEEDED):
        return speech.timed_out(server, timeout)
    return speech.refused(message)
