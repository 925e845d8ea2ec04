"""The OpenAPI document, from the routes and from the definitions that they read: bodies, forms, formats, docstrings.

`OPERATIONS` has what these do not say. A route without an entry is left out of the document, and a test fails.
"""

import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi.routing import APIRoute, APIWebSocketRoute
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from cosyvoice_triton.speech_service.audio.encoding import FORMATS
from cosyvoice_triton.speech_service.bodies import BatchRequest, SpeechRequest
from cosyvoice_triton.speech_service.routes import realtime, runtime_http, socket, triton_http
from cosyvoice_triton.speech_service.routes.responses import USAGE_HEADERS
from cosyvoice_triton.speech_service.security.guard import is_open

JSON, FORM, MULTIPART = "application/json", "application/x-www-form-urlencoded", "multipart/form-data"
Schema = dict[str, Any]
Content = dict[str, Schema]  # media type -> schema

STATUSES = {
    101: "the protocol is a WebSocket's from here on",
    400: "the request is wrong; `param` names the field",
    401: "no valid API key",
    403: "a web page of another site, or a host name, that is not allowed; or a voice of another API key",
    404: "the model, the voice or the path does not exist",
    409: "the name is taken, or the limit of voices is reached",
    413: "the request is larger than the limit",
    415: "the body is neither JSON nor a form",
    429: "too many streams at once: try again after the seconds in `Retry-After`",
    500: "an error of the service, which its log has",
    502: "the model failed",
    503: "no Triton answers, a part of it is down, or a voice's file is damaged; `Retry-After` in seconds",
    504: "no answer in time",
    507: "a voice cannot be stored: no space, or a folder that is read-only",
}
ALWAYS = (400, 403, 413, 500, 503)  # of what is checked before every route; 401, too, where a key is needed
SPEAKING = (400, 404, 415, 429, 502, 503, 504)

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}
TRUTH: Schema = {"type": "boolean"}
FILE: Schema = {"type": "string", "format": "binary"}


def described(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description}


def listing(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def record(fields: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """Return the schema of an object that has these fields and no others."""
    every = {**fields, **(optional or {})}
    return {"type": "object", "properties": every, "required": list(fields), "additionalProperties": False}


def named(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_ERROR = {"message": TEXT, "type": TEXT, "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]}}
_USAGE = {"input_tokens": INTEGER, "output_tokens": INTEGER, "total_tokens": INTEGER, "seconds": NUMBER}
_MODEL = {"id": TEXT, "object": TEXT, "created": INTEGER, "owned_by": TEXT}
_ABOUT_MODEL = {"name": TEXT, "languages": listing(TEXT), "instructions": TRUTH, "demo": TRUTH}
_ALIAS = {"alias_of": described(TEXT, "what the name stands for")}
_WARNINGS = {"warnings": listing(TEXT)}
_RIGHTS = {
    "consent": TEXT,
    "created_by": described(TEXT, "the name of the API key that added it"),
    "created_at": described(INTEGER, "seconds since 1970"),
}
_WHOLE = {
    "audio_data": described(TEXT, "in base64"),
    "media_type": TEXT,
    "sample_rate": INTEGER,
    "usage": named("Usage"),
}
_TIMES = {"segments": listing(named("Segment")), "subtitles": TEXT}
_WORD = {"word": TEXT, "start": NUMBER, "end": NUMBER}

SCHEMAS: dict[str, Schema] = {
    "Error": record({"error": record(_ERROR)}),
    "Usage": record(_USAGE),
    "Segment": record({"text": TEXT, "start": NUMBER, "end": NUMBER}, {"words": listing(record(_WORD))}),
    "Speech": record(_WHOLE, {**_WARNINGS, **_TIMES}),
    "Model": record(_MODEL, _ALIAS),
    "Voice": record({"id": TEXT, "object": TEXT, "name": TEXT}, {**_ALIAS, **_RIGHTS}),
    "BatchResult": {
        "oneOf": [
            record({"index": INTEGER, "status": {"const": "success"}, **_WHOLE}, {**_WARNINGS, **_TIMES}),
            record({"index": INTEGER, "status": {"const": "error"}, "error": record(_ERROR)}),
        ]
    },
}

_SPEECH_FIELDS = named(SpeechRequest.__name__)
_UPLOAD: Schema = {"allOf": [_SPEECH_FIELDS], "properties": {"ref_audio": FILE}}
_SPEECH_BODY: Content = {JSON: _SPEECH_FIELDS, MULTIPART: _UPLOAD, FORM: _SPEECH_FIELDS}
_AUDIO: Content = {kind.media_type: FILE for kind in FORMATS.values()}
_HEADERS = {
    "X-Sample-Rate": described(INTEGER, "of the audio, in Hz"),
    "X-Speech-Warning": described(TEXT, "percent-encoded; warnings that are known before the first byte"),
    **{
        name.title(): described(NUMBER, f"`{usage}` of the usage, of whole answers")
        for name, usage in USAGE_HEADERS.items()
    },
}
_EVENTS = described(
    TEXT,
    "events `speech.audio.delta` with `audio` in base64, `speech.audio.timestamps` with `segments`, then "
    "`speech.audio.done` with `usage`, `warnings`, `subtitles`, or `speech.audio.error` with `error`",
)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What the document says of a route beside its docstring.

    statuses: of its errors, without those of ALWAYS. headers: of its answer, beside X-Request-Id. query: its
    parameters, with what they mean. docs: text in the place of the docstring.
    """

    tag: str
    body: Content = field(default_factory=dict)
    answer: Content = field(default_factory=dict)
    success: int = 200
    statuses: tuple[int, ...] = ()
    headers: Mapping[str, Schema] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    docs: str = ""


def _runtime(path: str) -> Operation:
    """Return a route of the plain runtime, whose fields have other names."""
    known = SpeechRequest.model_fields
    fields = {
        ours: described(FILE if ours == "prompt_wav" else TEXT, known[name].description or "the voice")
        for ours, name in runtime_http.ROUTES[path].items()
    }
    form = {kind: record(fields) for kind in ([MULTIPART] if "prompt_wav" in fields else [MULTIPART, FORM])}
    docs = "CosyVoice's plain runtime: 16-bit samples at 24 kHz. Its own clients send the form with GET."
    return Operation(
        tag="Plain runtime",
        docs=docs,
        body=form,
        answer={FORMATS["pcm"].media_type: FILE},
        headers=_HEADERS,
        statuses=SPEAKING,
    )


_SPEAK = Operation(
    tag="Speech",
    body=_SPEECH_BODY,
    answer={**_AUDIO, "text/event-stream": _EVENTS, JSON: named("Speech")},
    headers=_HEADERS,
    statuses=SPEAKING,
)
_INSTEAD = Operation(tag="Kokoro-FastAPI", success=404, docs="Not served; the error says what to use in its place.")
_PREVIEW = record({"segments": listing(TEXT), "seconds": listing(NUMBER), "language": TEXT}, _WARNINGS)
_HEALTH = record({"status": TEXT}, {"tritons": listing(record({"address": TEXT, "models": listing(TEXT)}))})
_TENSOR = record(
    {"name": {"enum": [*triton_http.DATATYPES]}, "datatype": TEXT, "shape": listing(INTEGER)},
    {"data": {"type": "array"}, "parameters": {"type": "object"}},
)

OPERATIONS: dict[str, Operation] = {
    "POST /v1/audio/speech": _SPEAK,
    "POST /audio/speech": _SPEAK,
    "POST /v1/audio/speech/text": Operation(
        tag="Speech", body=_SPEECH_BODY, answer={JSON: _PREVIEW}, statuses=(400, 404, 415, 429, 503)
    ),
    "POST /v1/audio/speech/batch": Operation(
        tag="Speech",
        body={JSON: named(BatchRequest.__name__)},
        answer={JSON: record({"results": listing(named("BatchResult")), "succeeded": INTEGER, "failed": INTEGER})},
        statuses=(400, 415),
    ),
    "GET /v1/audio/speech/stream": Operation(tag="Speech", success=101, docs=str(socket.__doc__)),
    "GET /v1/realtime": Operation(
        tag="Speech", success=101, query={"model": "a served model"}, docs=str(realtime.__doc__)
    ),
    "GET /v1/models": Operation(tag="Models", answer={JSON: record({"object": TEXT, "data": listing(named("Model"))})}),
    "GET /v1/models/{name}": Operation(tag="Models", answer={JSON: named("Model")}, statuses=(404,)),
    "GET /v1/audio/models": Operation(
        tag="Models",
        answer={
            JSON: record({"models": listing(record({**_MODEL, **_ABOUT_MODEL}, _ALIAS)), "max_input_chars": INTEGER})
        },
    ),
    "GET /v1/audio/voices": Operation(
        tag="Voices",
        query={"legacy": "`true`: `voices` are names"},
        answer={
            JSON: record(
                {
                    "object": TEXT,
                    "voices": listing({"anyOf": [named("Voice"), TEXT]}),
                    "data": listing(named("Voice")),
                }
            )
        },
    ),
    "POST /v1/audio/voices": Operation(
        tag="Voices",
        body={
            MULTIPART: record(
                {"name": TEXT, "audio_sample": FILE},
                {
                    "ref_text": described(TEXT, "the transcript of the recording"),
                    "pronunciation": described(TEXT, "words, and what is spoken for each, one a line"),
                    "consent": described(TEXT, "the speaker's agreement, or where it is kept"),
                },
            )
        },
        answer={
            JSON: record(
                {"id": TEXT, "object": TEXT, "name": TEXT, "ref_text": TEXT, "seconds": NUMBER},
                {**_RIGHTS, **_WARNINGS},
            )
        },
        success=201,
        statuses=(400, 409, 415, 507),
    ),
    "POST /v1/audio/voices/import": Operation(
        tag="Voices",
        body={MULTIPART: record({"file": FILE}, {"name": described(TEXT, "instead of its own")})},
        answer={JSON: named("Voice")},
        success=201,
        statuses=(400, 409, 415, 507),
    ),
    "GET /v1/audio/voices/{name}/export": Operation(
        tag="Voices", answer={"application/zip": FILE}, statuses=(400, 404)
    ),
    "DELETE /v1/audio/voices/{name}": Operation(
        tag="Voices", answer={JSON: record({"id": TEXT, "object": TEXT, "deleted": TRUTH})}, statuses=(400, 404)
    ),
    "POST /dev/captioned_speech": Operation(
        tag="Kokoro-FastAPI",
        body={JSON: {"allOf": [_SPEECH_FIELDS], "properties": {"return_timestamps": TRUTH}}},
        answer={
            JSON: record(
                {
                    "audio": described(TEXT, "in base64"),
                    "audio_format": TEXT,
                    "timestamps": listing(record({"word": TEXT, "start_time": NUMBER, "end_time": NUMBER})),
                },
                _WARNINGS,
            )
        },
        headers=_HEADERS,
        statuses=SPEAKING,
    ),
    "POST /v1/audio/voices/combine": _INSTEAD,
    "POST /dev/phonemize": _INSTEAD,
    "POST /dev/generate_from_phonemes": _INSTEAD,
    **{f"{method} {path}": _runtime(path) for path in runtime_http.ROUTES for method in ("GET", "POST")},
    "POST /v2/models/{name}/infer": Operation(
        tag="Triton",
        body={JSON: record({"inputs": listing(_TENSOR)}, {"id": TEXT, "outputs": listing({}), "parameters": {}})},
        answer={JSON: {"type": "object"}, "application/octet-stream": FILE},
        statuses=SPEAKING,
    ),
    "GET /health": Operation(tag="Service", answer={JSON: _HEALTH}),
    "GET /metrics": Operation(tag="Service", answer={"text/plain": TEXT}),
    "GET /": Operation(tag="Service", answer={"text/html": TEXT}),
    "GET /docs": Operation(tag="Service", answer={"text/html": TEXT}),
    "GET /openapi.json": Operation(tag="Service", answer={JSON: {"type": "object"}}),
}


def document(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """Return the OpenAPI document of those of `routes` that `OPERATIONS` has."""
    _, models = models_json_schema(
        [(SpeechRequest, "validation"), (BatchRequest, "validation")], ref_template="#/components/schemas/{model}"
    )
    docs = operations(routes)
    paths: dict[str, dict[str, Any]] = {}
    for name, operation in OPERATIONS.items():
        if name in docs:
            method, path = name.split()
            paths.setdefault(path, {})[method.lower()] = _described(method, path, docs[name], operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "CosyVoice speech",
            "version": "1",
            "description": "Errors are in OpenAI's format. A field that is null counts as absent, an unknown one is an "
            "error. Every answer has the header `X-Request-Id`.",
        },
        "paths": paths,
        "components": {
            "schemas": {**models["$defs"], **SCHEMAS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def operations(routes: Iterable[BaseRoute]) -> dict[str, str]:
    """Return the docstrings of the routes that answer requests, by method and path. A WebSocket begins with GET."""
    found = {}
    for route in routes:
        if isinstance(route, APIRoute | APIWebSocketRoute):
            for method in (route.methods if isinstance(route, APIRoute) else None) or ("GET",):
                found[f"{method} {route.path}"] = inspect.getdoc(route.endpoint) or ""
    return found


def _described(method: str, path: str, docs: str, operation: Operation) -> dict[str, Any]:
    where = [(name, "path", "") for name in re.findall(r"\{(\w+)\}", path)]
    where += [(name, "query", text) for name, text in operation.query.items()]
    summary, _, more = (operation.docs or docs).partition("\n\n")
    needs_key = not is_open(path)
    errors = {*ALWAYS, *operation.statuses, *((401,) if needs_key else ())} - {operation.success}
    return {
        "tags": [operation.tag],
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": " ".join(summary.split()),
        **({"description": textwrap.dedent(more)} if more else {}),
        "parameters": [
            {"name": name, "in": place, "required": place == "path", "schema": TEXT, "description": text}
            for name, place, text in where
        ],
        **({"requestBody": {"required": True, "content": _content(operation.body)}} if operation.body else {}),
        "responses": {
            str(operation.success): {
                "description": STATUSES.get(operation.success, "success"),
                "headers": {name: {"schema": schema} for name, schema in operation.headers.items()},
                "content": _content(operation.answer or ({JSON: named("Error")} if operation.success == 404 else {})),
            },
            **{
                str(status): {"description": STATUSES[status], "content": _content({JSON: named("Error")})}
                for status in sorted(errors)
            },
        },
        "security": [{"key": []}] if needs_key else [],
    }


def _content(content: Content) -> dict[str, Any]:
    return {media_type: {"schema": schema} for media_type, schema in content.items()}
