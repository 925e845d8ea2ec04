"""/v1/audio/voices: listed, added, taken away."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from common.speech_service.errors import invalid
from common.speech_service.service import Service
from common.speech_service.speech_routes import read_fields

router = APIRouter()


@router.get("/v1/audio/voices")
async def voices(request: Request) -> dict[str, Any]:
    """The registered voices."""
    names = await asyncio.to_thread(Service.of(request).shelf.names)
    return {
        "object": "list",
        "voices": names,
        "data": [{"id": name, "object": "voice", "name": name} for name in names],
    }


@router.post("/v1/audio/voices")
async def add(request: Request) -> Response:
    """Register a voice: a form with `name`, `audio_sample` (a sound file) and `ref_text` (what it says)."""
    fields, data = await read_fields(request, "audio_sample")
    if data is None:
        raise invalid("audio_sample is missing: send the recording as a file of a multipart form", "audio_sample")
    name, text = str(fields.get("name", "")), str(fields.get("ref_text", ""))
    seconds = await asyncio.to_thread(Service.of(request).shelf.add, name, data, text)
    return JSONResponse(
        {"id": name, "object": "voice", "name": name, "ref_text": text, "seconds": round(seconds, 3)}, 201
    )


@router.delete("/v1/audio/voices/{name}")
async def remove(name: str, request: Request) -> dict[str, Any]:
    """Take a voice away; requests that name it are refused from then on."""
    await asyncio.to_thread(Service.of(request).shelf.remove, name)
    return {"id": name, "object": "voice", "deleted": True}
