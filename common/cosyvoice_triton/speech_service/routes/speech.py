"""POST /v1/audio/speech, its batch and its preview; GET /v1/models."""

import asyncio
import contextlib
import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from cosyvoice_triton import stacks
from cosyvoice_triton.errors import json_kind
from cosyvoice_triton.speech_service import openapi as doc
from cosyvoice_triton.speech_service.answer import SpeechAnswer
from cosyvoice_triton.speech_service.audio.encoding import FORMATS
from cosyvoice_triton.speech_service.bodies import OPENAI_MODELS, BatchRequest, SpeechRequest, is_openai_model, parse
from cosyvoice_triton.speech_service.errors import ApiError, invalid
from cosyvoice_triton.speech_service.limits import PathName
from cosyvoice_triton.speech_service.routes.reading import Body
from cosyvoice_triton.speech_service.routes.responses import (
    HEADERS,
    SPEECH,
    SPEECH_FIELDS,
    SPEECH_OPTIONS,
    USAGE,
    AudioResponse,
    events,
    unless_gone,
    whole,
)
from cosyvoice_triton.speech_service.service import Service
from cosyvoice_triton.tasks import TaskScope
from cosyvoice_triton.text.language import languages_of

BATCH_STREAMS = 4  # concurrent streams of one batch, so that it leaves capacity for interactive clients
RETRY_SECONDS = 1.0  # a refusal costs little, and the place may be free long before the Retry-After
PATHS = "/v1/audio/speech", "/audio/speech"  # the second for programs whose base URL has no /v1

router = APIRouter()


_EVENTS = doc.described(
    doc.TEXT,
    "events `speech.audio.delta` with `audio` in base64, `speech.audio.timestamps` with `segments`, then "
    "`speech.audio.done` with `usage`, `warnings`, `subtitles`, or `speech.audio.error` with `error`",
)
_AUDIO = {**{kind.media_type: doc.FILE for kind in FORMATS.values()}, "text/event-stream": _EVENTS}
_BODY, _BATCH_BODY = Body(SpeechRequest, "ref_audio"), Body(BatchRequest, kinds=(doc.JSON,))
_PREVIEW = doc.record(
    {"segments": doc.array(doc.TEXT), "seconds": doc.array(doc.NUMBER), "language": doc.TEXT},
    {"warnings": doc.array(doc.TEXT), "left_out": doc.array(doc.record({"text": doc.TEXT, "reason": doc.TEXT}))},
)
_OUTCOME = doc.record(
    {
        "id": doc.TEXT,
        "status": {"enum": ["in_progress", "completed", "failed", "aborted", "gone"]},
        "usage": doc.component("Usage", doc.record(USAGE)),
        "warnings": doc.array(doc.TEXT),
    },
    {"error": doc.ERROR},
)
_RESULT: doc.Schema = {
    "oneOf": [
        doc.record({"index": doc.INTEGER, "status": {"const": "success"}, **SPEECH_FIELDS}, SPEECH_OPTIONS),
        doc.record({"index": doc.INTEGER, "status": {"const": "error"}, "error": doc.ERROR}),
    ]
}
_BATCH = doc.record(
    {"results": doc.array(doc.component("BatchResult", _RESULT)), "succeeded": doc.INTEGER, "failed": doc.INTEGER}
)
_MODEL_FIELDS = {"id": doc.TEXT, "object": doc.TEXT, "created": doc.INTEGER, "owned_by": doc.TEXT}
_ABOUT_MODEL = {"name": doc.TEXT, "languages": doc.array(doc.TEXT), "instructions": doc.BOOLEAN, "demo": doc.BOOLEAN}
_ALIAS = {"alias_of": doc.described(doc.TEXT, "what the name stands for")}
_MODEL = doc.component("Model", doc.record(_MODEL_FIELDS, _ALIAS))
_MODELS = doc.record({"object": doc.TEXT, "data": doc.array(_MODEL)})
_AUDIO_MODEL = doc.record({**_MODEL_FIELDS, **_ABOUT_MODEL}, _ALIAS)
_AUDIO_MODELS = doc.record({"models": doc.array(_AUDIO_MODEL), "max_input_chars": doc.INTEGER})


def about_speech(body: Body) -> dict[str, Any]:
    """Return how a route is described that answers such a body with audio."""
    return doc.describe(
        "Speech", body=body.content, answer=SPEECH, content=_AUDIO, errors=doc.SPEAKING, headers=HEADERS
    )


@router.post(PATHS[1], **about_speech(_BODY))
@router.post(PATHS[0], **about_speech(_BODY))  # the lowest is the first in the documentation
async def speech(request: Request) -> Response:
    """Speak a text; the audio is streamed."""
    service = Service.of(request)
    async with service.dispatcher.upload_slot(request.headers.get("content-length")):
        wanted, upload = await _BODY.read(request)
        if wanted.stream_format == "audio":
            for field in ("timestamps", "subtitles"):
                if value := getattr(wanted, field):
                    raise invalid(f"{field} {value!r} with stream_format 'audio': use 'json' or 'sse'", field)
        answer = await service.answer(wanted, upload)
    return responded(service, wanted, answer)


def responded(service: Service, wanted: SpeechRequest, answer: SpeechAnswer) -> AudioResponse:
    """Return the response with an answer's audio, in the form that is wanted."""
    if wanted.stream_format == "sse" and not wanted.stream:
        raise invalid("stream false with stream_format 'sse': events are a stream", "stream")
    if wanted.stream_format == "sse":
        return AudioResponse(service, answer, "text/event-stream", streamed=events)
    if wanted.stream_format == "json":
        return AudioResponse(service, answer, "application/json", whole=partial(whole, answer))
    return AudioResponse(service, answer, whole=None if wanted.stream else bytes)


@router.get("/v1/audio/speech/{name}", **doc.describe("Speech", answer=_OUTCOME, errors=(404,)))
async def outcome(name: PathName, request: Request) -> dict[str, Any]:
    """Return how an answer ended, by its X-Request-ID or the id of a realtime response, for ten minutes."""
    return Service.of(request).outcomes.of(name)


@router.post(
    "/v1/audio/speech/text", **doc.describe("Speech", body=_BODY.content, answer=_PREVIEW, errors=(404, 415, 429))
)
async def text(request: Request) -> dict[str, Any]:
    """Return what will be spoken of a text: its segments in words, with expected seconds."""
    return await Service.of(request).preview(*await _BODY.read(request))


@router.post("/v1/audio/speech/batch", **doc.describe("Speech", body=_BATCH_BODY.content, answer=_BATCH, errors=(415,)))
async def batch(request: Request) -> Response:
    """Speak several texts, answered together. Failed items do not affect the others; those for which there is no place
    wait for one."""
    service = Service.of(request)
    wanted, _ = await _BATCH_BODY.read(request)
    slots = asyncio.Semaphore(BATCH_STREAMS)
    last_try = time.monotonic() + service.settings.timeout - RETRY_SECONDS

    async def one(index: int, item: Any) -> dict[str, Any]:
        async with slots:
            while True:
                try:
                    return {"index": index, "status": "success", **await _whole(service, item)}
                except ApiError as error:
                    if error.status != 429 or time.monotonic() > last_try:
                        return {"index": index, "status": "error", **error.body}
                await asyncio.sleep(RETRY_SECONDS)

    async def every() -> list[dict[str, Any]]:
        async with TaskScope() as tasks:  # an unforeseen error of one ends the others, too
            return await asyncio.gather(*(tasks.spawn(one(*item)) for item in enumerate(wanted.requests())))

    if (results := await unless_gone(request.receive, every())) is None:
        request.scope["speech.outcome"], results = "gone", []
    succeeded = sum(result["status"] == "success" for result in results)
    return JSONResponse({"results": results, "succeeded": succeeded, "failed": len(results) - succeeded})


async def _whole(service: Service, item: Any) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise invalid(f"the item is {json_kind(item)}, not a JSON object")
    wanted: SpeechRequest = parse(SpeechRequest, item, service.settings)
    wanted.stream = False
    answer = await service.answer(wanted)
    async with contextlib.aclosing(service.dispatcher.encoded(answer)) as parts:
        return whole(answer, b"".join([part async for part in parts]))


@router.get("/v1/models", **doc.describe("Models", answer=_MODELS))
async def models(request: Request) -> dict[str, Any]:
    """Return the served models, then OpenAI's names, which stand for the default one."""
    return {"object": "list", "data": list(_models(Service.of(request)).values())}


@router.get("/v1/models/{name}", **doc.describe("Models", answer=_MODEL, errors=(404,)))
async def model(name: PathName, request: Request) -> dict[str, Any]:
    """Return one of the models that `models` lists."""
    listed = _models(Service.of(request))
    if is_openai_model(name) and OPENAI_MODELS[0] in listed:
        return {**listed[OPENAI_MODELS[0]], "id": name}
    if name not in listed:
        raise ApiError(404, f"the model {name!r} is not served", code="model_not_found", param="model")
    return listed[name]


@router.get("/v1/audio/models", **doc.describe("Models", answer=_AUDIO_MODELS))
async def audio_models(request: Request) -> dict[str, Any]:
    """Return the same list in the form that Open WebUI reads, and the longest text that is accepted. Each model has its
    languages, whether it follows instructions, and whether it is the demo voice."""
    service = Service.of(request)
    listed = []
    for name, model in _models(service).items():
        served = model.get("alias_of", name)
        about = service.dispatcher.pool.about(served)
        languages = languages_of(stacks.of_model(served).name)
        known = {"languages": languages, "instructions": about.instructions, "demo": about.demo}
        listed.append({**model, "name": name, **known})
    return {"models": listed, "max_input_chars": service.settings.max_input_chars}


def _models(service: Service) -> dict[str, dict[str, Any]]:
    """Return the listed models by name; none if no Triton is available."""
    served = service.dispatcher.pool.models
    about = {"object": "model", "created": 0, "owned_by": "cosyvoice"}
    listed = {name: {"id": name, **about} for name in served}
    if (default := service.default_model) in listed:
        listed |= {name: {"id": name, **about, "alias_of": default} for name in OPENAI_MODELS}
    return listed
