"""The FastAPI routes of CosyVoice's plain runtime: forms in, 16-bit samples at 24 kHz out.

Its own clients send a form with GET; POST is accepted too.
"""

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

# The runtime's fields and their names in `SpeechRequest`.
NAMES = {"tts_text": "input", "spk_id": "voice", "prompt_text": "ref_text", "instruct_text": "instructions"}
ROUTES = {  # the fields of their forms; `prompt_wav` is a file
    "/inference_sft": ("tts_text", "spk_id"),
    "/inference_zero_shot": ("tts_text", "prompt_text", "prompt_wav"),
    "/inference_cross_lingual": ("tts_text", "prompt_wav"),
    "/inference_instruct": ("tts_text", "spk_id", "instruct_text"),
    "/inference_instruct2": ("tts_text", "instruct_text", "prompt_wav"),
}


async def infer(request: Request) -> Response:
    """CosyVoice's plain runtime: 16-bit samples at 24 kHz. Its own clients send the form with GET."""
    service = Service.of(request)
    async with service.dispatcher.upload_slot(request.headers.get("content-length")):
        fields, upload = await read_fields(request, "prompt_wav")
        values: dict[str, Any] = {}
        for field in ROUTES[request.url.path]:
            if field == "prompt_wav":
                if upload is None:
                    raise invalid("prompt_wav is missing: upload the recording as a file", field)
            elif not str(fields.get(field, "")).strip():
                raise invalid(f"{field} is missing", field)
            else:
                values[NAMES[field]] = str(fields[field])
        answer = await service.answer(
            parse(SpeechRequest, values, service.settings), upload, encoder=AudioEncoder("pcm")
        )
    return AudioResponse(service, answer)


for path, names in ROUTES.items():
    fields = {name: doc.field(SpeechRequest, NAMES[name]) if name in NAMES else doc.FILE for name in names}
    kinds = [doc.MULTIPART] if "prompt_wav" in fields else [doc.MULTIPART, doc.FORM]
    body, audio = dict.fromkeys(kinds, doc.record(fields)), {FORMATS["pcm"].media_type: doc.FILE}
    for method in ("GET", "POST"):
        about = doc.describe("Plain runtime", body=body, content=audio, errors=doc.SPEAKING, headers=HEADERS)
        router.add_api_route(path, infer, methods=[method], **about)
