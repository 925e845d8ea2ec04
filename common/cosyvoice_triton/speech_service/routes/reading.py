"""Request bodies as they come: JSON, forms, an upload; the document has what is read."""

import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Request
from pydantic import BaseModel
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from cosyvoice_triton.speech_service import openapi as doc
from cosyvoice_triton.speech_service.bodies import parse, read_json
from cosyvoice_triton.speech_service.errors import ApiError, invalid
from cosyvoice_triton.speech_service.limits import MAX_FIELDS
from cosyvoice_triton.speech_service.service import Service
from cosyvoice_triton.speech_service.settings import Settings


class Body:
    """The body of a route: the fields of a class, and in a multipart form a file in the field `upload`, if it takes
    one. kinds: the media types that the document names; all are read. needed: what to upload, if it may not be missing.
    """

    def __init__(
        self,
        fields: type[BaseModel],
        upload: str = "",
        kinds: Sequence[str] = (doc.JSON, doc.MULTIPART, doc.FORM),
        needed: str = "",
    ) -> None:
        self._fields, self._upload, self._needed = fields, upload, needed
        known = doc.model(fields)
        with_file = {"allOf": [known], "properties": {upload: doc.FILE}}
        self.content = {kind: with_file if upload and kind == doc.MULTIPART else known for kind in kinds}

    async def read(self, request: Request) -> tuple[Any, Any]:
        """Return the fields as an instance of the class, and the content of the file, if any. ApiError."""
        fields, data = await read_fields(request, self._upload)
        if data is None and self._needed:
            raise invalid(f"{self._upload} is missing: upload {self._needed} in a multipart form", self._upload)
        return parse(self._fields, fields, Service.of(request).settings), data


async def read_body(request: Request) -> bytes:
    """Return the body. ApiError for a compressed one, which could become any size."""
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("", "identity"):
        raise ApiError(415, f"content encoding {encoding!r} is not supported: send the body as it is")
    return await request.body()


async def read_fields(request: Request, upload: str = "") -> tuple[dict[str, Any], bytes | None]:
    """Return the fields of a JSON object or a form, and the content of the file in the field `upload`, if any.
    ApiError."""
    settings = Service.of(request).settings
    content_type = request.headers.get("content-type", "application/json").lower()
    kind = content_type.partition(";")[0].strip()
    if kind == "application/json":
        return read_json(await read_body(request), "the body", settings), None
    if kind == "application/x-www-form-urlencoded":
        body = await read_body(request)
        if body.lstrip()[:1] == b"{":
            raise ApiError(415, f"the body is JSON, but its header is 'Content-Type: {kind}': send application/json")
        return _given(_read_urlencoded(body, settings)), None
    if kind != "multipart/form-data":
        raise ApiError(415, f"content type {kind!r} is not supported: send application/json or multipart/form-data")
    if "charset" in content_type and "charset=utf-8" not in content_type:  # some of Python's codecs take minutes
        raise ApiError(415, "forms must be in UTF-8")
    async with _form(request, settings) as form:
        fields: dict[str, Any] = {name: value for name, value in form.items() if not _is_empty_file(value)}
        data = None
        if isinstance(file := fields.get(upload), UploadFile):
            data = await file.read()
            del fields[upload]
    if unexpected := [name for name, value in fields.items() if isinstance(value, UploadFile)]:
        hint = f": upload the file as {upload}" if upload else ""
        raise invalid(f"{unexpected[0]} must not be a file{hint}", unexpected[0])
    return _given(fields), data


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a form in which something was written."""
    return {name: value for name, value in fields.items() if value != ""}


class _CompleteForm(MultiPartParser):
    """Knows whether a form has its last boundary. The field that is cut off is not among the others."""

    complete = False
    spool_max_size = sys.maxsize  # files stay in memory, which has its budget: /tmp may be full

    def on_end(self) -> None:
        self.complete = True


@contextlib.asynccontextmanager
async def _form(request: Request, settings: Settings) -> AsyncIterator[FormData]:
    """Yield a multipart form. ApiError, also for one that is cut off."""
    parser = _CompleteForm(
        request.headers, request.stream(), max_files=1, max_fields=MAX_FIELDS, max_part_size=settings.max_body_bytes
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise invalid(f"the form cannot be read: {error.message}") from None
    try:
        if not parser.complete:
            raise invalid("the form is cut off: its last boundary is missing")
        yield form
    finally:
        await form.close()


def _is_empty_file(value: Any) -> bool:
    """Return whether a page sent a field for a file in which none was chosen."""
    return isinstance(value, UploadFile) and not value.filename and not value.size


def _read_urlencoded(body: bytes, settings: Settings) -> dict[str, Any]:
    """Return the fields of a form without files. ApiError."""
    if len(body) > settings.max_form_bytes:
        raise ApiError(413, f"the form has more than {settings.max_form_bytes} bytes: send multipart/form-data")
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict"))
    except ValueError as error:
        raise invalid(f"the form cannot be read: {error}") from None
