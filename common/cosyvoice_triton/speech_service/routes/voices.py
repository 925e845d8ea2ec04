"""/v1/audio/voices: list, add and delete registered voices."""

import asyncio
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from cosyvoice_triton.speech_service import openapi as doc
from cosyvoice_triton.speech_service.limits import NAME_CHARS, PathName, Text
from cosyvoice_triton.speech_service.routes.reading import Body
from cosyvoice_triton.speech_service.security.guard import API_KEY
from cosyvoice_triton.speech_service.service import Service
from cosyvoice_triton.speech_service.voices import NewVoice
from cosyvoice_triton.voice.files import MAX_NAME_BYTES, normalized

router = APIRouter()


_KNOWN = {"id": doc.TEXT, "object": doc.TEXT, "name": doc.TEXT}
_RIGHTS = {
    "consent": doc.TEXT,
    "created_by": doc.described(doc.TEXT, "the name of the API key that added it, or `anyone`"),
    "created_at": doc.described(doc.INTEGER, "seconds since 1970"),
}
_ALIAS = {"alias_of": doc.described(doc.TEXT, "what the name stands for")}
_VOICE = doc.component("Voice", doc.record(_KNOWN, {**_ALIAS, **_RIGHTS}))
_VOICES = doc.record(
    {"object": doc.TEXT, "voices": doc.array({"anyOf": [_VOICE, doc.TEXT]}), "data": doc.array(_VOICE)}
)
_ADDED = doc.record(
    {**_KNOWN, "ref_text": doc.TEXT, "seconds": doc.NUMBER}, {**_RIGHTS, "warnings": doc.array(doc.TEXT)}
)
_DELETED = doc.record({"id": doc.TEXT, "object": doc.TEXT, "deleted": doc.BOOLEAN})


class ExportedVoice(BaseModel):
    """A voice that was exported."""

    name: Annotated[Text, Field(max_length=MAX_NAME_BYTES)] = Field("", description="instead of its own")


_NEW = Body(NewVoice, "audio_sample", (doc.MULTIPART,), needed="the recording as a file")
_EXPORTED = Body(ExportedVoice, "file", (doc.MULTIPART,), needed="an exported voice")
_ADDING: dict[str, Any] = {"success": 201, "errors": (409, 415, 507)}
_Legacy = Annotated[str, Query(description="`true`: `voices` are names", max_length=NAME_CHARS)]


@router.get("/v1/audio/voices", **doc.describe("Voices", answer=_VOICES))
async def list_voices(request: Request, legacy: _Legacy = "") -> dict[str, Any]:
    """Return the registered voices, then the aliases. `voices` is for Open WebUI and Kokoro's clients, `data` for
    OpenAI's. `legacy`: `voices` are names, as Kokoro's older clients read them."""
    voices = Service.of(request).voices
    names, aliases = await asyncio.to_thread(voices.names), await asyncio.to_thread(voices.aliases)
    key = API_KEY.get()
    known = await asyncio.to_thread(
        lambda: [{**_voice(name), **voices.rights(name).shown_to(key).known} for name in names]
    )
    listed = known + [{**_voice(name), "alias_of": voice} for name, voice in aliases.items()]
    old = legacy.lower() in ("true", "1")
    return {"object": "list", "voices": [each["id"] for each in listed] if old else listed, "data": listed}


def _voice(name: str) -> dict[str, Any]:
    return {"id": name, "object": "voice", "name": name}


@router.post("/v1/audio/voices", **doc.describe("Voices", body=_NEW.content, answer=_ADDED, **_ADDING))
async def add(request: Request) -> Response:
    """Register a voice: a form with `name`, `audio_sample` (an audio file), `ref_text` (its transcript),
    `instructions` and `loudness` (how it speaks), `pronunciation` (its dictionary) and `consent` (the speaker's, or
    where it is kept)."""
    new, data = await _NEW.read(request)
    voices, name, key = Service.of(request).voices, normalized(new.name), API_KEY.get()
    judged = await asyncio.to_thread(voices.add, new, data, key)
    rights = voices.rights(name).shown_to(key)
    about = {**_voice(name), **rights.known, "ref_text": new.ref_text, "seconds": round(judged.seconds, 3)}
    unknown = (f"the field {field[:40]!r} is unknown and was left out" for field in sorted(new.model_extra))
    warnings = [*judged.warnings, *unknown]
    return JSONResponse({**about, **({"warnings": warnings} if warnings else {})}, 201)


@router.post("/v1/audio/voices/import", **doc.describe("Voices", body=_EXPORTED.content, answer=_VOICE, **_ADDING))
async def load(request: Request) -> Response:
    """Register a voice that was exported: a form with `file`, and `name` for another one than its own."""
    wanted, data = await _EXPORTED.read(request)
    service = Service.of(request)
    name = await asyncio.to_thread(service.voices.load, data, wanted.name, key := API_KEY.get())
    return JSONResponse({**_voice(name), **service.voices.rights(name).shown_to(key).known}, 201)


@router.get(
    "/v1/audio/voices/{name}/export", **doc.describe("Voices", content={"application/zip": doc.FILE}, errors=(404,))
)
async def export(name: PathName, request: Request) -> Response:
    """Return a voice as one file, with its consent, for the API key that registered it."""
    data = await asyncio.to_thread(Service.of(request).voices.export, name, API_KEY.get())
    quoted = quote(name, safe="")  # curl understands the plain form only
    named = f'filename="{name}.zip"' if name == quoted else f"filename*=UTF-8''{quoted}.zip"
    return Response(data, media_type="application/zip", headers={"Content-Disposition": f"attachment; {named}"})


@router.delete("/v1/audio/voices/{name}", **doc.describe("Voices", answer=_DELETED, errors=(404,)))
async def remove(name: PathName, request: Request) -> dict[str, Any]:
    """Delete a voice, for the API key that registered it; later requests that name it are rejected."""
    await asyncio.to_thread(Service.of(request).voices.remove, name, API_KEY.get())
    return {"id": name, "object": "voice", "deleted": True}
