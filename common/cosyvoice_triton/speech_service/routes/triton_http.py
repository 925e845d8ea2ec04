"""Triton's offline requests over HTTP: POST /v2/models/MODEL/infer.

Triton 2.51 crashes on some JSON: a hundred thousand brackets, or a shape whose size in bytes is 2^64. So the gateway
sends these requests here, where their size and their shapes are checked, and Triton gets them over gRPC. A model that
streams is answered as a whole, too.
"""

import asyncio
import json
import math
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from cosyvoice_triton.client.answer import WAVEFORM
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.speech_service import openapi as doc
from cosyvoice_triton.speech_service.answer import SpeechAnswer
from cosyvoice_triton.speech_service.errors import ApiError, invalid, naming
from cosyvoice_triton.speech_service.routes.speech import read_body
from cosyvoice_triton.speech_service.security.guard import API_KEY
from cosyvoice_triton.speech_service.service import Service
from cosyvoice_triton.speech_service.settings import Settings
from cosyvoice_triton.voice.prompt import validate_reference

HEADER_LENGTH = "inference-header-content-length"  # bytes of JSON, which binary tensors follow
MAX_NUMBERS = 3 << 19  # in JSON, somewhat more than those of the longest recording
_TEXTS = ("target_text", "reference_text", "speaker", "instruct_text")
DATATYPES = {
    "reference_wav": "FP32",
    "reference_wav_len": "INT32",
    "reference_sample_rate": "INT32",
    **dict.fromkeys(_TEXTS, "BYTES"),
}

router = APIRouter()


_TENSOR = doc.record(
    {"name": {"enum": [*DATATYPES]}, "datatype": doc.TEXT, "shape": doc.array(doc.INTEGER)},
    {"data": {"type": "array"}, "parameters": {"type": "object"}},
)
_BINARY = {"application/octet-stream": doc.FILE}
_REQUEST = doc.record({"inputs": doc.array(_TENSOR)}, {"id": doc.TEXT, "outputs": doc.array({}), "parameters": {}})


@router.post(
    "/v2/models/{name}/infer",
    **doc.describe(
        "Triton", body={doc.JSON: _REQUEST}, answer={"type": "object"}, content=_BINARY, errors=doc.SPEAKING
    ),
)
async def infer(name: str, request: Request) -> Response:
    """Return a model's whole answer to a request in Triton's protocol, and errors in Triton's form."""
    service = Service.of(request)
    try:
        async with service.dispatcher.upload_slot(request.headers.get("content-length")):
            body = await read_body(request)
            wanted = await asyncio.to_thread(_content, body, request.headers.get(HEADER_LENGTH), service.settings)
            utterance = await asyncio.to_thread(_utterance, wanted, service.settings)
        answer = SpeechAnswer((utterance,), len(utterance.target_text), name, API_KEY.get())
        parts = [part async for part in service.dispatcher.waveforms(answer)]
        return await asyncio.to_thread(_answer, name, np.concatenate(parts), _is_binary(wanted), wanted.get("id"))
    except ApiError as error:
        headers = {"Retry-After": str(error.retry_after)} if error.retry_after else None
        return JSONResponse({"error": error.message}, error.status, headers)


def _content(body: bytes, header_length: str | None, settings: Settings) -> dict[str, Any]:
    """Return the request's JSON, with the binary tensors as `data` of their inputs. ApiError."""
    length = len(body)
    if header_length is not None:
        if not header_length.isdecimal() or int(header_length) > len(body):
            raise invalid(f"{HEADER_LENGTH} {header_length!r} of a body of {len(body)} bytes")
        length = int(header_length)
    if body[:length].count(b",") > MAX_NUMBERS:
        raise ApiError(413, f"the request has more than {MAX_NUMBERS} values")
    try:
        content = json.loads(body[:length])
    except RecursionError:
        raise invalid("the request has objects or lists inside of one another, too many levels of them") from None
    except ValueError as error:
        raise invalid(f"the request is not JSON: {error}") from None
    inputs = content.get("inputs") if isinstance(content, dict) else None
    if not isinstance(inputs, list) or not all(isinstance(each, dict) for each in inputs):
        raise invalid("the request has no inputs")
    for each in inputs:
        size = _parameters(each).get("binary_data_size")
        if size is not None:
            if not isinstance(size, int) or not 0 <= size <= len(body) - length:
                raise invalid(f"binary_data_size {size!r} with {len(body) - length} bytes left")
            each["data"] = body[length : length + size]
            length += size
    return content


def _utterance(content: dict[str, Any], settings: Settings) -> Utterance:
    """Return the request of a model. ApiError naming the input that is wrong."""
    values = {str(each.get("name")): _value(each) for each in content["inputs"]}
    for name in _TEXTS:
        if len(values.get(name, "")) > settings.max_input_chars:
            raise invalid(f"{name} has more than {settings.max_input_chars} characters")
    if "target_text" not in values:
        raise invalid("the input target_text is missing")
    length = values.pop("reference_wav_len", None)
    if sequence := [name for name in _parameters(content) if name.startswith("sequence_")]:
        raise invalid(f"the parameter {sequence[0]!r}: text in pieces is for streams of gRPC, or the WebSocket")
    parameters = {
        name: str(value) if isinstance(value, float) else value
        for name, value in _parameters(content).items()
        if name not in ("binary_data_output", "priority", "timeout") and isinstance(value, bool | int | float | str)
    }
    with naming(None):
        if (wav := values.pop("reference_wav", None)) is not None:
            rate = values["reference_sample_rate"] = int(values.get("reference_sample_rate", PROMPT_SAMPLE_RATE))
            values["reference"] = validate_reference(wav, None if length is None else int(length), rate)
        return Utterance(parameters={**parameters, "played": False}, **values)


def _value(tensor: dict[str, Any]) -> Any:
    """Return an input's text, number or samples (N,). ApiError unless its type and shape are those of its data."""
    name, shape, data = tensor.get("name"), tensor.get("shape"), tensor.get("data")
    if not isinstance(name, str) or name not in DATATYPES:
        raise invalid(f"the input {name!r} is unknown; inputs: {', '.join(DATATYPES)}")
    if tensor.get("datatype") != DATATYPES[name]:
        raise invalid(f"{name} is {tensor.get('datatype')!r}, not {DATATYPES[name]}")
    if not isinstance(shape, list) or not all(isinstance(size, int) and 0 < size < 1 << 31 for size in shape):
        raise invalid(f"{name}: the shape {shape!r} is not a list of sizes")
    try:
        read = _texts(data) if name in _TEXTS else _numbers(data, "<f4" if name == "reference_wav" else "<i4")
    except (ValueError, TypeError, OverflowError) as error:
        raise invalid(f"{name} cannot be read: {error}") from None
    if len(read) != math.prod(shape) or name != "reference_wav" and len(read) != 1:
        raise invalid(f"{name}: {len(read)} values for the shape {shape}")
    return read if name == "reference_wav" else read[0]


def _parameters(of: dict[str, Any]) -> dict[str, Any]:
    found = of.get("parameters")
    return found if isinstance(found, dict) else {}


def _texts(data: Any) -> list[str]:
    """Return texts: a list, perhaps inside of others, or one after its length in four bytes, as Triton sends them."""
    if isinstance(data, bytes):
        if int.from_bytes(data[:4], "little") != len(data) - 4:
            raise ValueError("it is not one text with its length")
        return [data[4:].decode()]
    while isinstance(data, list) and len(data) == 1 and isinstance(data[0], list):
        data = data[0]
    if not isinstance(data, list) or not all(isinstance(each, str) for each in data):
        raise ValueError("it is not a list of texts")
    return list(data)


def _numbers(data: Any, kind: str) -> np.ndarray:
    if isinstance(data, bytes):
        return np.frombuffer(data, kind)
    values = np.asarray(data)
    if values.dtype.kind not in "if":
        raise ValueError("it is not a list of numbers")
    with np.errstate(over="ignore"):  # to infinity, which the checks of a recording refuse
        return values.reshape(-1).astype(kind)


def _is_binary(content: dict[str, Any]) -> bool:
    outputs = content.get("outputs")
    for each in outputs if isinstance(outputs, list) else ():
        if isinstance(each, dict) and each.get("name") == WAVEFORM:
            return bool(_parameters(each).get("binary_data", False))
    return bool(_parameters(content).get("binary_data_output", False))


def _answer(model: str, waveform: np.ndarray, binary: bool, name: Any) -> Response:
    output: dict[str, Any] = {"name": WAVEFORM, "datatype": "FP32", "shape": [1, waveform.size]}
    head = {"model_name": model, "model_version": "1", **({"id": name} if isinstance(name, str) else {})}
    if not binary:
        return JSONResponse({**head, "outputs": [{**output, "data": waveform.tolist()}]})
    data = waveform.astype("<f4").tobytes()
    header = json.dumps({**head, "outputs": [{**output, "parameters": {"binary_data_size": len(data)}}]}).encode()
    headers = {HEADER_LENGTH: str(len(header))}
    return Response(header + data, media_type="application/octet-stream", headers=headers)
