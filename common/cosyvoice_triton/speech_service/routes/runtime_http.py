"""The FastAPI routes of CosyVoice's plain runtime: forms in, 16-bit samples at 24 kHz out.

Its own clients send a form with GET; POST is accepted too.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cosyvoice_triton.speech_service import openapi as doc
from cosyvoice_triton.speech_service.audio.encoding import FORMATS, AudioEncoder
from cosyvoice_triton.speech_service.bodies import SpeechRequest, parse
from cosyvoice_triton.speech_service.errors import invalid
from cosyvoice_triton.speech_service.routes.reading import read_fields
from cosyvoice_triton.speech_service.routes.responses import HEADERS, AudioResponse
from cosyvoice_triton.speech_service.service import Service

router = APIRouter()

# Route -> the fields of its form and their names in `SpeechRequest`; `prompt_wav` is a file.
_INPUT = {"tts_text": "input"}
ROUTES: Mapping[str, Mapping[str, str]] = {
    "/inference_sft": {**_INPUT, "spk_id": "voice"},
    "/inference_zero_shot": {**_INPUT, "prompt_text": "ref_text", "prompt_wav": "ref_audio"},
    "/inference_cross_lingual": {**_INPUT, "prompt_wav": "ref_audio"},
    "/inference_instruct": {**_INPUT, "spk_id": "voice", "instruct_text": "instructions"},
    "/inference_instruct2": {**_INPUT, "instruct_text": "instructions", "prompt_wav": "ref_audio"},
}


async def infer(request: Request) -> Response:
    """CosyVoice's plain runtime: 16-bit samples at 24 kHz. Its own clients send the form with GET."""
    service = Service.of(request)
    names = ROUTES[request.url.path]
    async with service.dispatcher.upload_slot(request.headers.get("content-length")):
        fields, upload = await read_fields(request, "prompt_wav")
        values: dict[str, Any] = {}
        for field, name in names.items():
            if field == "prompt_wav":
                if upload is None:
                    raise invalid("prompt_wav is missing: upload the recording as a file", field)
            elif not str(fields.get(field, "")).strip():
                raise invalid(f"{field} is missing", field)
            else:
                values[name] = str(fields[field])
        answer = await service.answer(
            parse(SpeechRequest, values, service.settings), upload, encoder=AudioEncoder("pcm")
        )
    return AudioResponse(service, answer)


for path, names in ROUTES.items():
    fields = {
        field: doc.FILE if field == "prompt_wav" else doc.field(SpeechRequest, name) for field, name in names.items()
    }
    kinds = [doc.MULTIPART] if "prompt_wav" in fields else [doc.MULTIPART, doc.FORM]
    body, audio = dict.fromkeys(kinds, doc.record(fields)), {FORMATS["pcm"].media_type: doc.FILE}
    for method in ("GET", "POST"):
        about = doc.describe("Plain runtime", body=body, content=audio, errors=doc.SPEAKING, headers=HEADERS)
        router.add_api_route(path, infer, methods=[method], **about)
