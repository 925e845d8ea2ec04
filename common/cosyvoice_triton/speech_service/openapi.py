"""The OpenAPI document: FastAPI's of what the decorators of the routes say, and what holds for all routes.

`describe` makes a decorator's arguments. The routes read bodies themselves, so FastAPI knows none of them.
"""

import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute, APIWebSocketRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute

from cosyvoice_triton.speech_service.limits import with_settings
from cosyvoice_triton.speech_service.security.guard import is_open
from cosyvoice_triton.speech_service.settings import Settings

JSON, FORM, MULTIPART = "application/json", "application/x-www-form-urlencoded", "multipart/form-data"
Schema = dict[str, Any]
Content = Mapping[str, Schema]  # media type -> schema

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
SPEAKING = (404, 415, 429, 502, 504)  # of requests for speech

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}
FILE: Schema = {"type": "string", "format": "binary"}


def described(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description}


def array(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def record(fields: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """Return the schema of an object that has these fields and no others."""
    every = {**fields, **(optional or {})}
    return {"type": "object", "properties": every, "required": list(fields), "additionalProperties": False}


def named(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_SCHEMAS: dict[str, Schema] = {}
_MODELS: dict[str, type[BaseModel]] = {}


def model(kind: type[BaseModel]) -> Schema:
    """Add a class to those that the document has by name; return a reference to it."""
    _MODELS[kind.__name__] = kind
    return named(kind.__name__)


def field(kind: type[BaseModel], name: str) -> Schema:
    """Return the schema of a field of a class, without its name; of several types the first."""
    schema: Schema = kind.model_json_schema()["properties"][name]
    schema |= schema.pop("anyOf", [{}])[0]
    return {key: value for key, value in schema.items() if key not in ("title", "default")}


def component(name: str, schema: Schema) -> Schema:
    """Add a schema to those that the document has by name; return a reference to it."""
    _SCHEMAS[name] = schema
    return named(name)


_NULLABLE: Schema = {"type": ["string", "null"]}
ERROR = record({"message": TEXT, "type": TEXT, "param": _NULLABLE, "code": _NULLABLE})
FAILED = component("Error", record({"error": ERROR}))


def describe(
    tag: str,
    *,
    body: Content | None = None,
    answer: Schema | None = None,
    content: Content | None = None,
    success: int = 200,
    errors: Collection[int] = (),
    headers: Mapping[str, Schema] | None = None,
) -> dict[str, Any]:
    """Return the arguments with which a route's decorator describes it.

    answer: the JSON of a success. content: what else it may be. errors: statuses, without those of ALWAYS. headers: of
    a success, beside X-Request-Id.
    """
    contents = {**(content or {}), **({JSON: answer} if answer else {})}
    succeeded = {
        "description": STATUSES.get(success, "success"),
        "headers": {name: {"schema": schema} for name, schema in (headers or {}).items()},
        "content": _content(contents),
    }
    return {
        "tags": [tag],
        "status_code": success,
        "responses": {**{status: _error(status) for status in errors}, success: succeeded},
        "response_class": JSONResponse if answer else Response,
        "response_model": None,  # FastAPI need not check and copy what the routes return
        "openapi_extra": {"requestBody": {"required": True, "content": _content(body)}} if body else None,
    }


def document(routes: Iterable[BaseRoute], settings: Settings) -> dict[str, Any]:
    """Return the OpenAPI document of the routes that answer requests, with the limits that are settings."""
    known = get_openapi(
        title="CosyVoice speech",
        version="1",
        description="Errors are in OpenAI's format. A field that is null counts as absent, an unknown one is an error. "
        "Every answer has the header `X-Request-Id`.",
        routes=[route if isinstance(route, APIRoute) else _handshake(route) for route in served(routes)],
    )
    for path, methods in known["paths"].items():
        for method, operation in methods.items():
            operation |= _completed(operation, method, path)
    known["components"] = {"schemas": _components(), "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    return dict(with_settings(known, settings))


def _components() -> dict[str, Schema]:
    _, models = models_json_schema(
        [(kind, "validation") for kind in _MODELS.values()], ref_template=named("{model}")["$ref"]
    )
    return {**models.get("$defs", {}), **_SCHEMAS}


def served(routes: Iterable[BaseRoute]) -> list[APIRoute | APIWebSocketRoute]:
    """Return the routes that belong into the document."""
    return [route for route in routes if isinstance(route, APIRoute | APIWebSocketRoute)]


def _handshake(route: APIWebSocketRoute) -> APIRoute:
    """Return a route with the description of a WebSocket, which FastAPI leaves out: that of its module."""
    docs = sys.modules[route.endpoint.__module__].__doc__
    return APIRoute(route.path, route.endpoint, methods=["GET"], description=docs, **describe("Speech", success=101))


def _completed(operation: Mapping[str, Any], method: str, path: str) -> dict[str, Any]:
    """Return what replaces parts of an operation that FastAPI has described."""
    summary, _, more = operation["description"].partition("\n\n")
    needs_key = not is_open(path)
    responses = {str(status): _error(status) for status in (*ALWAYS, *((401,) if needs_key else ()))}
    responses |= {status: each for status, each in operation["responses"].items() if status != "422"}  # FastAPI's own
    return {
        "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_"),
        "summary": " ".join(summary.split()),
        "description": textwrap.dedent(more),
        "parameters": operation.get("parameters", []),
        "responses": dict(sorted(responses.items())),
        "security": [{"key": []}] if needs_key else [],
    }


def _error(status: int) -> dict[str, Any]:
    return {"description": STATUSES[status], "content": _content({JSON: FAILED})}


def _content(content: Content) -> dict[str, Any]:
    return {media_type: {"schema": schema} for media_type, schema in content.items()}
