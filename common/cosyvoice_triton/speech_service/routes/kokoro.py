"""Routes of Kokoro-FastAPI: speech with its words' times, and what to use in the place of the others."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cosyvoice_triton.speech_service import openapi as doc
from cosyvoice_triton.speech_service.answer import SpeechAnswer
from cosyvoice_triton.speech_service.bodies import SpeechRequest
from cosyvoice_triton.speech_service.errors import ApiError
from cosyvoice_triton.speech_service.routes.reading import Body
from cosyvoice_triton.speech_service.routes.responses import HEADERS, AudioResponse, whole
from cosyvoice_triton.speech_service.service import Service

PATH = "/dev/captioned_speech"

router = APIRouter()

_INSTEAD = {
    "/v1/audio/voices/combine": "name the mix as the voice of a request, such as slt(2)+rms(1)",
    "/dev/phonemize": "this model reads text: see the field pronunciation",
    "/dev/generate_from_phonemes": "this model reads text: see the field pronunciation",
}


class CaptionedRequest(SpeechRequest):
    """The body of POST /dev/captioned_speech, of which the answer always has the times of words."""

    return_timestamps: bool = True


_BODY = Body(CaptionedRequest, kinds=(doc.JSON,))
_TIMES = doc.array(doc.record({"word": doc.TEXT, "start_time": doc.NUMBER, "end_time": doc.NUMBER}))
_CAPTIONED = doc.record(
    {"audio": doc.described(doc.TEXT, "in base64"), "audio_format": doc.TEXT, "timestamps": _TIMES},
    {"warnings": doc.array(doc.TEXT)},
)


@router.post(
    PATH, **doc.describe("Kokoro-FastAPI", body=_BODY.content, answer=_CAPTIONED, errors=doc.SPEAKING, headers=HEADERS)
)
async def captioned(request: Request) -> Response:
    """Speak a text; the answer is one JSON object with the audio and the times of its words, also if `stream` is
    true."""
    service = Service.of(request)
    async with service.dispatcher.upload_slot(request.headers.get("content-length")):
        wanted, _ = await _BODY.read(request)
        if wanted.model == "kokoro":  # its clients' default
            wanted.model = ""
        wanted.stream_format, wanted.timestamps = "json", "word"
        answer = await service.answer(wanted)
    return AudioResponse(service, answer, "application/json", whole=partial(_captioned_json, answer))


def _captioned_json(answer: SpeechAnswer, audio: bytes) -> dict[str, Any]:
    given = whole(answer, audio)
    words = [word for segment in given["segments"] for word in segment["words"]]
    times = [{"word": word["word"], "start_time": word["start"], "end_time": word["end"]} for word in words]
    content = {"audio": given["audio_data"], "audio_format": given["media_type"], "timestamps": times}
    return {**content, **answer.with_warnings}


async def _instead(request: Request) -> Response:
    """Not served; the error says what to use in its place."""
    raise ApiError(404, f"{request.url.path} does not exist: {_INSTEAD[request.url.path]}", code="unsupported")


_NOT_SERVED = doc.describe("Kokoro-FastAPI", answer=doc.FAILED, success=404)
for path in _INSTEAD:
    router.add_api_route(path, _instead, methods=["POST"], **_NOT_SERVED)
