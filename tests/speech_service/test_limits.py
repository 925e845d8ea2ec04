"""Every field of every route with the largest value that is allowed and the first that is refused, and every route with
bodies that cost much to read: what the service spends on them, and how long others wait meanwhile.

All of it is made from the OpenAPI document. What is spent is compared with what this machine needs for known work, so
that a slow one passes.
"""

import contextlib
import copy
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from cosyvoice_triton.speech_service import openapi
from cosyvoice_triton.speech_service.settings import Settings

from tests.speech_service.test_encoding import peak
from tests.support.raw_connections import WEBSOCKET, frame, opened, read_all, request
from tests.support.sounds import BOMBS, flac, in_base64, recording
from tests.support.speech_fixtures import SPEECH, TEXT, speech_process, stub_triton
from tests.support.triton_stub import TritonStub

pytestmark = pytest.mark.serial

SECONDS_PER_BYTE, BYTES_PER_BYTE = 1e-6, 100
SECONDS, BYTES = 0.1, 48 << 20  # of any request
WAIT_SECONDS = 0.1  # of others
LOOP, LOOP_SECONDS = 1_000_000, 0.05  # a loop, and the seconds that it takes where the bounds above were set
MAX_REFERENCE_MB = 1


def slowness() -> float:
    """How much slower than the machine where the bounds were set this one is; at least 1."""
    begin = time.process_time()
    for _ in range(LOOP):
        pass
    return max(1.0, (time.process_time() - begin) / LOOP_SECONDS)


class Service:
    """A service in a process of its own: what it spends, and how long another caller waits."""

    def __init__(self, url: str, process: int) -> None:
        self.url = url
        self._process = psutil.Process(process)
        self._slow = slowness()
        self.client = httpx.Client(base_url=url, timeout=60)
        self.quiet, _ = self._longest_wait(lambda: time.sleep(1.0))

    def _cpu(self) -> float:
        """The CPU seconds of the process and of those that it has started and that have ended."""
        return sum(self._process.cpu_times()[:4])

    def _longest_wait(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """The longest time in which /health answers while `work` runs, and its result."""
        waits, done = [0.0], threading.Event()

        def ask() -> None:
            with httpx.Client(base_url=self.url, timeout=60) as other:
                other.get("/health")
                while not done.is_set():
                    begin = time.perf_counter()
                    other.get("/health")
                    waits.append(time.perf_counter() - begin)
                    time.sleep(0.002)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            result = work()
        finally:
            done.set()
            thread.join()
        return max(waits), result

    def check(self, what: str, size: int | None, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, which sends `size` bytes (None: until it is stopped); work again if it took too
        much, since other processes can only add to it."""
        for _ in range(4):
            Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")  # the peak begins anew
            cpu, memory = self._cpu(), self._process.memory_info().rss
            alone = work() if size is not None else None
            cpu = self._cpu() - cpu
            wait, result = self._longest_wait(work)
            spent = {
                "CPU s": (cpu, (SECONDS + SECONDS_PER_BYTE * (size or 0)) * self._slow),
                "bytes": (peak(self._process.pid) - memory, BYTES + BYTES_PER_BYTE * (size or 0)),
                "wait": (wait, (WAIT_SECONDS + 3 * self.quiet) * self._slow),
            }
            if all(found <= limit for found, limit in spent.values()):
                return result if alone is None else alone
            self.quiet = max(self.quiet, self._longest_wait(lambda: time.sleep(0.5))[0])  # of a busy machine
        raise AssertionError(f"{what} of {size} bytes: {spent} (found, limit)")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    voices = str(tmp_path_factory.mktemp("voices"))
    with stub_triton(TritonStub()) as triton:
        options = ("--url", triton, "--ref_audios_dir", voices, "--max_reference_mb", str(MAX_REFERENCE_MB))
        with speech_process(*options) as (url, process):
            measured = Service(url, process.pid)
            yield measured
            measured.client.close()


def tensor(name: str, datatype: str, data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [1, len(data)], "data": data, "parameters": {"a": "b"}}


WAVE = [0.1 * (-1) ** n for n in range(16_000)]
INPUTS = [tensor("target_text", "BYTES", ["Hi."]), tensor("reference_wav", "FP32", WAVE)]
BODIES: dict[str, dict[str, Any]] = {  # what is valid; others are made of the fields that are required
    "/v1/audio/speech/batch": {"items": [TEXT]},
    "/v2/models/{name}/infer": {
        "inputs": [*INPUTS, tensor("reference_sample_rate", "INT32", [16_000])],
        "outputs": [{"name": "waveform", "parameters": {"binary_data": False}}],
        "parameters": {"seed": 1},
    },
}
ALIKE = {f"/inference_{name}" for name in ("sft", "cross_lingual", "instruct", "instruct2")}  # read like one another
# Of these only the messages of the models tell, or another field has to fit.
UNTRIED = {"data"}


def resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with what it refers to, and all of its parts joined."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]] | {"description": ""}
    for part in schema.get("allOf", ()):
        part = resolved(document, part)
        schema = part | schema | {"properties": part.get("properties", {}) | schema.get("properties", {})}
    return schema


def fields_of(document: dict[str, Any], schema: dict[str, Any], value: Any, path: tuple = ()) -> Iterator[Any]:
    """The path and the schema of each field, also inside of the objects and lists of a valid value."""
    schema = resolved(document, schema)
    for one in schema.get("anyOf", ()):
        yield from fields_of(document, one, value, path)
    for one in schema.get("oneOf", ()):
        known = resolved(document, one)["properties"]["name"]
        if value["name"] in known.get("enum", [known.get("const")]):
            yield from fields_of(document, one, value, path)
    if path:
        yield path, schema
    for name, field in schema.get("properties", {}).items():
        inner = value.get(name) if isinstance(value, dict) else None
        yield from fields_of(document, field, inner, (*path, name))
    if "items" in schema and isinstance(value, list):
        for number, each in enumerate(value[:3]):
            yield from fields_of(document, schema["items"], each, (*path, number))


def largest(schema: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The largest values that a schema allows, each with the first that it refuses."""
    kind, text = schema.get("type"), schema.get("maxLength")
    if kind == "string" and text is not None:
        for begin, char in (("", "a"), ("", "\u0301"), ("[pause ", "1")):
            if text > len(begin):
                yield begin + char * (text - len(begin)), begin + char * (text + 1)
    if kind == "integer":
        most = schema.get("maximum", schema.get("exclusiveMaximum", 0) - 1)
        yield most, most + 1
        yield most, int("9" * 4000)
    if kind == "array" and "maxItems" in schema:
        yield [0] * schema["maxItems"], [0] * (schema["maxItems"] + 1)
    if kind == "object" and "maxProperties" in schema:
        many = {str(number): "a" for number in range(schema["maxProperties"] + 1)}
        yield dict(list(many.items())[1:]), many


def sent(service: Service, method: str, path: str, kind: str, body: dict[str, Any], schema: dict[str, Any]) -> Any:
    url = service.url + path.replace("{name}", "cosyvoice2_dit")
    if kind == openapi.JSON:
        content = json.dumps(body, ensure_ascii=False)
        return httpx.request(method, url, content=content, headers={"content-type": kind}, timeout=60)
    files = {name: ("a.wav", recording()) for name, field in schema["properties"].items() if field.get("format")}
    texts = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in body.items()}
    return httpx.request(method, url, data=texts, files=files or None, timeout=60)


TOO_LONG = ("more than", "at most", "less than", "should have", "Exceeds")


def routes(document: dict[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any], dict[str, Any]]]:
    """The method, path, media type (JSON if there is a choice), schema and a valid body of each route that reads one;
    once, if it has two names."""
    known = set()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            about = operation["summary"], json.dumps(operation.get("requestBody"))
            if "requestBody" in operation and about not in known:
                known.add(about)
                content = operation["requestBody"]["content"]
                kind = next(each for each in (openapi.JSON, openapi.MULTIPART, openapi.FORM) if each in content)
                schema = resolved(document, content[kind]["schema"])
                needed = {
                    name: "Hello." for name in schema.get("required", ()) if "format" not in schema["properties"][name]
                }
                yield method, path, kind, schema, copy.deepcopy(BODIES.get(path, needed))


def replaced(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    body = copy.deepcopy(body)
    at: Any = body
    for step in path[:-1]:
        if isinstance(at, dict) and not isinstance(at.get(step), dict | list):
            at[step] = {}
        at = at[step]
    at[path[-1]] = value
    return body


def test_the_largest_value_of_every_field_is_taken_and_the_first_beyond_is_refused_at_little_cost(service) -> None:
    document = service.client.get("/openapi.json").json()
    tried = 0
    for method, path, kind, schema, body in routes(document):
        for where, field in fields_of(document, schema, body):
            for allowed, refused in () if where[-1] in UNTRIED else largest(field):
                for value, fits in ((allowed, True), (refused, False)):
                    whole = replaced(body, where, value)
                    ask = partial(sent, service, method, path, kind, whole, schema)
                    answer = service.check(f"{method} {path} {where}", len(json.dumps(whole)), ask)
                    about = (method, path, where, str(value)[:20], answer.status_code, answer.text[:300])
                    assert answer.status_code < 500, about
                    said = answer.text if answer.status_code == 400 else ""
                    if fits and str(where[-1]) in said:
                        assert not any(words in said for words in TOO_LONG), about
                    if not fits:
                        refused_item = '"failed":1' in answer.text
                        assert answer.status_code in (400, 404, 413) or refused_item, about
                        assert len(answer.content) < 4000, about
                    tried += 1
    assert tried > 300
    for path, operations in document["paths"].items():
        for given in (each for operation in operations.values() for each in operation["parameters"]):
            value = "\u0301" * (given["schema"]["maxLength"] + 1)
            if given["in"] == "path":
                path = path.replace("{name}", value)
            method = next(iter(operations))
            assert service.client.request(method, path, params={given["name"]: value}).status_code in (400, 404, 426)


def repeated(unit: bytes, begin: bytes = b"", end: bytes = b"") -> Callable[[int], bytes]:
    return lambda size: begin + unit * ((size - len(begin) - len(end)) // len(unit)) + end


SIZE = Settings(max_reference_mb=MAX_REFERENCE_MB).max_body_bytes
NESTED = {
    "a text": repeated(b"a", b'{"input": "', b'"}'),
    "blanks": repeated(b" ", b"{", b"}"),
    "escapes": repeated(b"\\u0301", b'{"input": "', b'"}'),
    "quotes": repeated(b'\\"', b'{"input": "', b'"}'),
    "brackets": repeated(b"[", b'{"input": '),
    "objects": repeated(b'{"a":', b""),
    "empty lists": repeated(b"[],", b'{"inputs": [', b"0]}"),
    "empty objects": repeated(b"{},", b'{"inputs": [', b"0]}"),
    "digits": repeated(b"1", b'{"seed": ', b"}"),
    "digits of a fraction": repeated(b"1", b'{"speed": 0.', b"}"),
    "an exponent": repeated(b"1", b'{"speed": 1e', b"}"),
    "numbers": repeated(b"0,", b'{"inputs": [{"shape": [', b"0]}]}"),
    "large numbers": repeated(b"2147483647,", b'{"inputs": [{"shape": [', b"0]}]}"),
    "names": lambda size: json.dumps(dict.fromkeys(map(str, range(size // 12)), 0)).encode(),
    "a name": repeated(b"a", b'{"', b'": 1}'),
    "a name of marks": repeated("\u0301".encode(), b'{"voice": "', b'"}'),
    "a dictionary": repeated(b"a = b\\n", b'{"input": "a", "pronunciation": "', b'"}'),
    "many texts": repeated(
        b'"",', b'{"inputs": [{"name": "reference_wav", "datatype": "FP32", "shape": [1], "data": [', b'""]}]}'
    ),
    "texts of unequal lengths": lambda size: json.dumps(
        {"inputs": [tensor("reference_wav", "FP32", [*[""] * 300, "a" * (size // 2)])]}
    ).encode(),
    "base64 of marks": repeated("é".encode(), b'{"input": "a", "ref_audio": "', b'"}'),
}


@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
def test_a_body_of_the_largest_size_costs_little_whatever_it_is(service: Service, make: Callable[[int], bytes]) -> None:
    document = service.client.get("/openapi.json").json()
    body = make(SIZE - 64)
    parts = b'--b\r\nContent-Disposition: form-data; name="name"\r\n\r\n' + body[:-200] + b"\r\n--b--\r\n"
    contents = {openapi.JSON: body, openapi.FORM: body, f"{openapi.MULTIPART}; boundary=b": parts}
    for method, path, kind, *_ in routes(document):
        if path in ALIKE:
            continue
        ask = partial(httpx.request, method, service.url + path.replace("{name}", "cosyvoice2_dit"), timeout=60)
        for header, content in contents.items():
            if header.startswith(kind) or path == SPEECH:
                send = partial(ask, content=content, headers={"content-type": header})
                assert service.check(f"{method} {path} {header}", len(content), send).status_code < 500


def test_a_body_in_chunks_of_one_byte_holds_up_nobody(service: Service) -> None:
    head = request(line=f"POST {SPEECH}").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunks = b"1\r\na\r\n" * 200_000 + b"0\r\n\r\n"

    def send() -> None:
        with opened(service.url, head + chunks) as client:
            assert client.recv(12) == b"HTTP/1.1 400"

    service.check("chunks", len(chunks), send)


@pytest.mark.parametrize("name", [*BOMBS, "many blocks"])
def test_a_recording_costs_as_much_as_its_bytes_whatever_its_header_says(service: Service, name: str) -> None:
    data = BOMBS.get(name) or flac(192_000, 40_000, 16)
    post = partial(httpx.post, timeout=60)
    for send in (
        partial(post, service.url + SPEECH, json={**TEXT, "ref_audio": in_base64(data)}),
        partial(post, service.url + SPEECH, data=TEXT, files={"ref_audio": ("a", data)}),
        partial(post, f"{service.url}/v1/audio/voices", data={"name": "a"}, files={"audio_sample": ("a", data)}),
    ):
        answer = service.check(name, len(data), send)
        assert answer.status_code == 400 and "recording" in answer.text, answer.text


FRAMES = {
    "empty pieces": frame(0, b"", fin=False),
    "pings": frame(9, b""),
    "errors": frame(1, b"{}"),
    "texts": frame(1, b'{"type": "input.text", "text": "a"}'),
}


@pytest.mark.parametrize("path", [f"{SPEECH}/stream", "/v1/realtime", "/v1/audio/voice-conversion/stream"])
@pytest.mark.parametrize("data", FRAMES.values(), ids=FRAMES)
def test_a_flood_of_frames_takes_its_share_and_is_ended(service: Service, data: bytes, path: str) -> None:
    def flood() -> None:
        with opened(service.url, request(headers=WEBSOCKET, line=f"GET {path}")) as client:
            assert client.recv(12) == b"HTTP/1.1 101"
            ended = threading.Thread(target=read_all, args=(client,), daemon=True)
            last = time.monotonic() + 60
            ended.start()
            with contextlib.suppress(OSError):
                client.sendall(frame(1, b"", fin=False) if data[0] == 0 else b"")
                while ended.is_alive() and time.monotonic() < last:
                    client.sendall(data * 1000)
            ended.join(1.0)
            assert not ended.is_alive()

    service.check("frames", None, flood)
