"""The OpenAPI document against the routes that exist, what they read, and what they answer."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jsonschema
import pytest
from cosyvoice_triton import speech_service
from cosyvoice_triton.speech_service import openapi
from cosyvoice_triton.speech_service.app import build, routes_of
from cosyvoice_triton.speech_service.settings import Settings

from tests.support.speech_fixtures import RECORDING, StubbedService

TO_ADD = "add it to the `describe` of the route's decorator"
SOURCES = Path(speech_service.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
EVERYWHERE = {"x-request-id", "x-accel-buffering"}


@pytest.fixture(scope="module")
def client(served: StubbedService) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    answer = client.get("/openapi.json")
    assert answer.status_code == 200
    return dict(answer.json())


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The method, the path and the description of each."""
    for path, methods in document["paths"].items():
        yield from ((method.upper(), path, operation) for method, operation in methods.items())


def test_every_route_is_described(document: dict[str, Any]) -> None:
    for method, path, operation in operations(document):
        assert operation.get("tags"), f"{method} {path} is not described: give its decorator a `describe`"
        assert operation["summary"], f"{method} {path} has no docstring, which the document would show"


def test_every_field_of_speech_is_explained(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["SpeechRequest"]["properties"]
    assert [name for name, field in fields.items() if not field.get("description")] == []


def test_references_lead_to_schemas_and_statuses_of_the_sources_are_documented(document: dict[str, Any]) -> None:
    references = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)))
    assert references <= set(document["components"]["schemas"])
    sources = "".join(path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py"))
    raised = set(re.findall(r"ApiError\(\s*(\d{3})", sources)) | {"400", "502"}
    everywhere = {status for _, _, operation in operations(document) for status in operation["responses"]}
    assert raised - {"405"} <= everywhere, "add these to the `errors` of a `describe`"


LENGTHS = {"maxItems": "items", "maxProperties": "entries", "maxLength": "characters"}


def limits_of(schema: Any, components: dict[str, Any], name: str = "") -> Iterator[tuple[str, int, str]]:
    """What counts, how much of it there may be, and in which field."""
    for each in (schema, *(part for several in ("anyOf", "oneOf", "allOf") for part in schema.get(several, ()))):
        if "$ref" in each:
            yield from limits_of(components[each["$ref"].rpartition("/")[2]], components, name)
        yield from ((unit, each[key], name) for key, unit in LENGTHS.items() if key in each and name)
        for inner, field in (*each.get("properties", {}).items(), *([("", each["items"])] if "items" in each else [])):
            yield from limits_of(field, components, inner)


class Names:
    """Settings whose values are their names."""

    def __getattr__(self, name: str) -> str:
        return name


def test_the_table_of_limits_is_that_of_all_fields() -> None:
    """Copy it from here when a limit changes."""
    document = openapi.document(routes_of(build(Settings())), Names())  # type: ignore[arg-type]
    table: dict[tuple[int, int, str], set[str]] = {}
    for _, _, operation in operations(document):
        for content in operation.get("requestBody", {"content": {}})["content"].values():
            for unit, most, name in limits_of(content["schema"], document["components"]["schemas"]):
                setting = most if isinstance(most, str) else ""
                size = getattr(Settings(), setting) if setting else most
                table.setdefault((list(LENGTHS.values()).index(unit), size, setting), set()).add(name)
    rows = []
    for unit, size, setting in sorted(table):
        own = f" (`--{setting.replace('_chars', '_mb') if 'reference' in setting else setting}`)" if setting else ""
        names = ", ".join(f"`{name}`" for name in sorted(table[unit, size, setting]))
        rows.append(f"| {size:,} {list(LENGTHS.values())[unit]}{own} | {names} |\n")
    text = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
    written = text.partition("## Limits\n")[2].partition("|---|---|\n")[2].partition("\n\n")[0] + "\n"
    assert written == "".join(rows)


WRONG: list[dict[str, Any]] = [
    {},
    {"json": {}},
    {"json": {"input": "lost", "voice": "x"}},
    {"content": b"x", "headers": {"content-type": "a/b"}},
]


def test_whatever_a_route_answers_is_documented(client: httpx.Client, document: dict[str, Any]) -> None:
    """Also to requests that are wrong, each of which it answers with an error in the documented form."""
    for method, path, operation in operations(document):
        if "101" in operation["responses"]:  # of a WebSocket
            continue
        for request in WRONG if method == "POST" else WRONG[:1]:
            answer = client.request(method, path.replace("{name}", "nobody"), **request)
            status = str(answer.status_code)
            what = f"{method} {path} answers {status}: add it to the `errors` of its `describe`"
            assert status in operation["responses"], what
            if answer.status_code >= 400 and not path.startswith("/v2/"):
                jsonschema.validate(answer.json(), {**document["components"]["schemas"]["Error"]})


def test_answers_have_the_documented_fields_and_no_others(client: httpx.Client, document: dict[str, Any]) -> None:
    def check(name: str, answer: httpx.Response) -> None:
        method, path = name.split()
        known = document["paths"][path][method.lower()]["responses"][str(answer.status_code)]
        own = {header for header in answer.headers if header.startswith("x-")} - EVERYWHERE
        assert own <= {header.lower() for header in known["headers"]}, f"{name} has these headers: {TO_ADD}"
        content = known["content"]
        schema = content[answer.headers["content-type"].partition(";")[0]]["schema"]
        jsonschema.validate(answer.json(), {**schema, "components": document["components"]})

    path = "/v1/audio/voices"
    added = {"name": "mia", "pronunciation": "a = b", "consent": "yes"}, {"audio_sample": RECORDING.read_bytes()}
    spoken = {"input": "warn me", "stream_format": "json", "timestamps": "word", "subtitles": "srt"}
    check(f"POST {path}", client.post(path, data=added[0], files=added[1]))
    for name in ("/v1/models", "/v1/audio/models", path, f"{path}?legacy=true", "/health"):
        check(f"GET {name.partition('?')[0]}", client.get(name))
    check("GET /v1/models/{name}", client.get("/v1/models/tts-1"))
    check("POST /v1/audio/speech", client.post("/v1/audio/speech", json=spoken))
    check("POST /v1/audio/speech/text", client.post("/v1/audio/speech/text", json={"input": "[pause 1s] [x:y] two."}))
    items = [{**spoken, "stream_format": "audio"}, {"input": "refuse"}]
    check("POST /v1/audio/speech/batch", client.post("/v1/audio/speech/batch", json={"items": items}))
    check(f"DELETE {path}/{{name}}", client.delete(f"{path}/mia"))


def test_the_documentation_needs_no_key_and_loads_nothing_of_others(client: httpx.Client) -> None:
    for path in ("/", "/docs"):
        answer = client.get(path)
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert not re.search(r'(?:src|href)="(?!/)', answer.text)
