"""Requests to the speech models over gRPC, streamed or offline, with tritonclient's asyncio client.

A connection carries any number of requests at once; each is cancelled with the task that awaits it.
"""

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
import tritonclient.grpc.aio as triton
from tritonclient.grpc import InferInput
from tritonclient.utils import InferenceServerException

from cosyvoice_triton import stacks
from cosyvoice_triton.addresses import ENDED_EARLY, channel_options
from cosyvoice_triton.client import failures
from cosyvoice_triton.client.answer import AudioPart, Recorder, SpeechResult
from cosyvoice_triton.client.failures import ClientError
from cosyvoice_triton.client.utterance import Parameters, Utterance
from cosyvoice_triton.monitoring import tracing

CONNECT_SECONDS = 10.0


async def synthesize(
    server: str, model: str, request: Utterance, mode: str = "streaming", timeout: float = 60.0
) -> SpeechResult:
    """Send one request over its own connection; it is cancelled with the task that awaits it.

    server: host:port. mode: "streaming" or "offline". timeout: seconds until the answer must be complete.
    Raise ClientError for any failure.
    """
    async with AsyncConnection(server) as connection:
        await require_model(connection.client, server, model, mode)
        recorder = Recorder()
        async with aclosing(connection.stream(model, request, mode, timeout)) as parts:
            async for part in parts:
                recorder.add(part)
        return recorder.finish()


class AsyncConnection:
    """tritonclient's asyncio client, whose errors are ClientErrors."""

    def __init__(self, server: str) -> None:
        self._server = server
        self.client = triton.InferenceServerClient(server, channel_args=channel_options(server))

    async def stream(
        self, model: str, request: Utterance, mode: str, timeout: float
    ) -> AsyncGenerator[AudioPart, None]:
        """Yield the responses as they arrive; closing the iterator cancels the request."""
        try:
            async with aclosing(chunks(self.client, model, request, timeout, offline=mode == "offline")) as parts:
                async for part in parts:
                    yield part
        except InferenceServerException as error:
            raise explained(error.status(), error.message(), self._server, timeout) from None

    async def aclose(self) -> None:
        await self.client.close()

    async def __aenter__(self) -> "AsyncConnection":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def require_model(connection: triton.InferenceServerClient, server: str, model: str, mode: str) -> None:
    """Raise ClientError unless `model` is ready and supports this mode."""
    try:
        if not await connection.is_model_ready(model, client_timeout=CONNECT_SECONDS):
            raise failures.not_served(server, model)
        answer = await connection.get_model_config(model, client_timeout=CONNECT_SECONDS)
    except InferenceServerException as error:
        raise failures.unreachable(server, error.message()) from None
    if mode == "offline" and answer.config.model_transaction_policy.decoupled:
        raise failures.streams_only(model)


async def served_model(connection: triton.InferenceServerClient, server: str) -> str:
    """Return the first of the stacks' models that the server has. Raise ClientError if there is none."""
    try:
        for model in stacks.orchestrators():
            if await connection.is_model_ready(model, client_timeout=CONNECT_SECONDS):
                return model
    except InferenceServerException as error:
        raise failures.unreachable(server, error.message()) from None
    raise failures.not_served(server, " or ".join(stacks.orchestrators()))


async def chunks(
    connection: triton.InferenceServerClient, model: str, request: Utterance, timeout: float, *, offline: bool = False
) -> AsyncGenerator[AudioPart, None]:
    """Yield the responses to a request as they arrive, the only one to an offline request; closing the iterator cancels
    the request. The server's error is an InferenceServerException.

    The generator of a stream's requests ends, which half-closes the call: the server closes its side after the final
    response to the last request, so no end marker is needed.
    """
    if offline:
        options = {"headers": request.headers(), "parameters": _parameters(request)}
        inputs = request.tensors(InferInput)
        yield AudioPart.of(await connection.infer(model, inputs, client_timeout=timeout, **options))
        return
    responses = connection.stream_infer(_requests(model, request), stream_timeout=timeout, headers=request.headers())
    try:
        async for result, error in responses:
            if error is not None:
                raise error
            yield AudioPart.of(result)
    except grpc.aio.AioRpcError as error:
        status, message = error.code(), error.details()
        if message == ENDED_EARLY:
            status = grpc.StatusCode.UNAVAILABLE
            message = "the server has ended the call before the request was sent: retry"
        raise InferenceServerException(message, status=str(status)) from error
    finally:
        responses.cancel()


def _parameters(request: Utterance) -> Parameters | None:
    return {**request.parameters, **tracing.carried()} or None


async def _requests(model: str, request: Utterance) -> AsyncGenerator[dict[str, Any], None]:
    """Yield one request; what comes in pieces is a sequence of them: START with the voice, of speech also with the
    first piece, END after the last one."""
    about = {"model_name": model, "parameters": _parameters(request)}
    if request.pieces is None and request.source_pieces is None:
        yield about | {"inputs": request.tensors(InferInput)}
        return
    sequence = {"model_name": model, "sequence_id": 1 + secrets.randbelow(2**63 - 1)}
    start = about | sequence | {"sequence_start": True}
    if request.pieces is not None:
        yield start | {"inputs": request.tensors(InferInput)}
        async for text in request.pieces:
            yield sequence | {"inputs": Utterance(text).tensors(InferInput)}
    elif request.source_pieces is not None:
        async for samples in request.source_pieces:
            piece = replace(request if start else Utterance(""), source=samples)
            yield (start or sequence) | {"inputs": piece.tensors(InferInput)}
            start = {}
    yield sequence | {"inputs": Utterance("").tensors(InferInput), "sequence_end": True}


def explained(status: str | None, message: str | None, server: str, timeout: float) -> ClientError:
    """Return the ClientError for a failed call; `status` and `message` are gRPC's."""
    if status == str(grpc.StatusCode.DEADLINE_EXCEEDED):
        return failures.timed_out(server, timeout)
    if status == str(grpc.StatusCode.UNAVAILABLE):
        return failures.unavailable(server, message)
    return failures.refused(message)
