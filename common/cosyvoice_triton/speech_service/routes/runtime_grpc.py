"""The gRPC service of CosyVoice's plain runtime."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
from async_timeout import timeout

from cosyvoice_triton.addresses import join
from cosyvoice_triton.constants import MAX_REFERENCE_SECONDS, PROMPT_SAMPLE_RATE
from cosyvoice_triton.speech_service.answer import SpeechAnswer
from cosyvoice_triton.speech_service.audio.encoding import AudioEncoder
from cosyvoice_triton.speech_service.audio.recordings import from_pcm16
from cosyvoice_triton.speech_service.bodies import SpeechRequest, parse
from cosyvoice_triton.speech_service.errors import ApiError, invalid
from cosyvoice_triton.speech_service.routes.runtime_http import NAMES
from cosyvoice_triton.speech_service.security.guard import check_key
from cosyvoice_triton.speech_service.service import Service
from cosyvoice_triton.speech_service.settings import MAX_CHAR_BYTES, Settings

logger = logging.getLogger(__name__)

PROTO = "cosyvoice_triton/speech_service/routes/cosyvoice.proto"
GRACE_SECONDS = 5.0  # for live calls; uvicorn has waited DRAIN_SECONDS for the other streams by then

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


@contextlib.asynccontextmanager
async def serving(service: Service) -> AsyncIterator[None]:
    """Run the gRPC server while the block runs, if the settings have a `runtime_port`. OSError if it is in use."""
    host, wanted = service.settings.host, service.settings.runtime_port
    if wanted is None:
        yield
        return
    settings = service.settings
    server = grpc.aio.server(options=_options(settings), maximum_concurrent_rpcs=settings.max_connections)
    server.add_generic_rpc_handlers((RuntimeServicer(service).handler(),))
    try:
        port = server.add_insecure_port(join(host, wanted))
    except RuntimeError as error:
        raise OSError(f"port {wanted} of the plain runtime's gRPC service cannot be used: {error}") from None
    await server.start()
    logger.info("the plain runtime's gRPC service listens on %s", join(host, port))
    try:
        yield
    finally:
        await server.stop(GRACE_SECONDS)


def _options(settings: Settings) -> list[tuple[str, int]]:
    recording = 2 * 2 * int(MAX_REFERENCE_SECONDS * PROMPT_SAMPLE_RATE)  # twice the longest, for an error that says so
    return [
        # gRPC collects a message before anything of ours sees it: as little as the texts and the recording need.
        ("grpc.max_receive_message_length", recording + 3 * MAX_CHAR_BYTES * settings.max_input_chars),
        # Of a connection: one that has more calls than streams is told so, and none can take the calls of all.
        ("grpc.max_concurrent_streams", 2 * settings.max_streams),
        ("grpc.max_connection_idle_ms", round(1000 * settings.idle)),
        ("grpc.so_reuseport", 0),  # otherwise a second service could silently share the port
    ]


class RuntimeServicer:
    """Implements `CosyVoice`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        # Compiled at run time: no generated code to keep up to date.
        self._messages, _ = grpc.protos_and_services(PROTO)

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of all its methods.

        `Inference` has one request. To the server it is a stream of them, because otherwise gRPC waits for the request,
        for as long as the caller likes, before it calls anything of ours.
        """
        method = grpc.stream_stream_rpc_method_handler(
            self.Inference, self._messages.Request.FromString, self._messages.Response.SerializeToString
        )
        return grpc.method_handlers_generic_handler("cosyvoice.CosyVoice", {"Inference": method})

    async def Inference(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:  # noqa: N802
        """Answer one request with a stream of 16-bit samples. The key is checked before the request is read."""
        try:
            metadata = dict(context.invocation_metadata() or ())
            key = check_key(str(metadata.get("authorization", "")), self._service.settings.api_keys)
            self._service.dispatcher.check()
            answer = await self._answer(await self._first(requests))
            answer.key = key
            async with contextlib.aclosing(self._service.dispatcher.encoded(answer)) as parts:
                async for part in parts:
                    yield self._messages.Response(tts_audio=part)
        except ApiError as error:
            await context.abort(_CODES.get(error.status, grpc.StatusCode.INTERNAL), error.message)

    async def _first(self, requests: AsyncIterator[Any]) -> Any:
        seconds = self._service.settings.receive_timeout
        try:
            async with timeout(seconds):
                return await anext(requests)
        except asyncio.TimeoutError:
            raise ApiError(504, f"the request did not arrive within {seconds:g} s") from None
        except StopAsyncIteration:
            raise invalid("the call has no request") from None

    async def _answer(self, request: Any) -> SpeechAnswer:
        kind = request.WhichOneof("RequestPayload")
        if kind is None:
            raise invalid("the request is empty")
        payload = getattr(request, kind)
        known = payload.DESCRIPTOR.fields_by_name
        values = {name: getattr(payload, field) for field, name in NAMES.items() if field in known}
        recording = payload.prompt_audio if "prompt_audio" in known else None
        return await self._service.answer(
            parse(SpeechRequest, values, self._service.settings), recording, from_pcm16, AudioEncoder("pcm")
        )
