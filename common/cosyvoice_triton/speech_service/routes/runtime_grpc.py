"""The gRPC service of CosyVoice's plain runtime."""

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from cosyvoice_triton.speech_service.audio.encoding import AudioEncoder
from cosyvoice_triton.speech_service.audio.recordings import from_pcm16
from cosyvoice_triton.speech_service.bodies import SpeechRequest, parse
from cosyvoice_triton.speech_service.dispatcher import SpeechJob
from cosyvoice_triton.speech_service.errors import ApiError, invalid
from cosyvoice_triton.speech_service.security.guard import check_key
from cosyvoice_triton.speech_service.service import Service

logger = logging.getLogger(__name__)

PROTO = "cosyvoice_triton/speech_service/routes/cosyvoice.proto"
GRACE_SECONDS = 5.0

_FIELDS = (("spk_id", "voice"), ("instruct_text", "instructions"), ("prompt_text", "ref_text"))  # (its field, ours)
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
    _, services = grpc.protos_and_services(PROTO)  # compiled at run time: no generated code to keep up to date
    server = grpc.aio.server(options=_options(service), maximum_concurrent_rpcs=service.settings.max_connections)
    services.add_CosyVoiceServicer_to_server(RuntimeServicer(service), server)
    try:
        port = server.add_insecure_port(f"{host}:{wanted}")
    except RuntimeError as error:
        raise OSError(f"port {wanted} of the plain runtime's gRPC service cannot be used: {error}") from None
    await server.start()
    logger.info("the plain runtime's gRPC service listens on %s:%d", host, port)
    try:
        yield
    finally:
        await server.stop(GRACE_SECONDS)


def _options(service: Service) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", service.settings.max_body_bytes),
        ("grpc.max_connection_idle_ms", round(1000 * service.settings.idle)),
        ("grpc.so_reuseport", 0),  # otherwise a second service could silently share the port
    ]


class RuntimeServicer:
    """Implements `CosyVoice`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._messages, _ = grpc.protos_and_services(PROTO)

    async def Inference(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:  # noqa: N802
        """Answer one request with a stream of 16-bit samples."""
        try:
            metadata = dict(context.invocation_metadata() or ())
            check_key(str(metadata.get("authorization", "")), self._service.settings.api_keys)
            job = await self._job(request)
            async with contextlib.aclosing(self._service.audio(job, AudioEncoder("pcm"))) as parts:
                async for part in parts:
                    yield self._messages.Response(tts_audio=part)
        except ApiError as error:
            await context.abort(_CODES.get(error.status, grpc.StatusCode.INTERNAL), error.message)

    async def _job(self, request: Any) -> SpeechJob:
        kind = request.WhichOneof("RequestPayload")
        if kind is None:
            raise invalid("the request is empty")
        payload = getattr(request, kind)
        values = {"input": payload.tts_text}
        for field, name in _FIELDS:
            if field in payload.DESCRIPTOR.fields_by_name:
                values[name] = getattr(payload, field)
        recording = payload.prompt_audio if "prompt_audio" in payload.DESCRIPTOR.fields_by_name else None
        return await self._service.job(parse(SpeechRequest, values), recording, from_pcm16)
