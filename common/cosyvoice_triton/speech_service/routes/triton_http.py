"""Triton's offline requests over HTTP: POST /v2/models/MODEL/infer.

Triton 2.51 crashes on some JSON: a hundred thousand brackets, or a shape whose size in bytes is 2^64. So the gateway
sends these requests here, where their size and their shapes are checked, and Triton gets them over gRPC. A model that
streams is answered as a whole, too.
"""

import asyncio
import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sized
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from cosyvoice_triton.client.answer import WAVEFORM
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.speech_service import limits
from cosyvoice_triton.speech_service import openapi as doc
from cosyvoice_triton.speech_service.answer import SpeechAnswer
from cosyvoice_triton.speech_service.bodies import parse_json
from cosyvoice_triton.speech_service.errors import ApiError, invalid, naming
from cosyvoice_triton.speech_service.routes.reading import read_body
from cosyvoice_triton.speech_service.security.guard import API_KEY
from cosyvoice_triton.speech_service.service import Service
from cosyvoice_triton.speech_service.settings import Settings
from cosyvoice_triton.voice.prompt import validate_reference

HEADER_LENGTH = "inference-header-content-length"  # bytes of JSON, which binary tensors follow

ValueT = TypeVar("ValueT")
Few = Annotated[list[ValueT], Field(max_length=16, fail_fast=True)]
Sample = Annotated[float, Field(strict=True)]
Wave = Annotated[list[Sample], Field(max_length=limits.MAX_NUMBERS, fail_fast=True)]
Integer = Annotated[limits.Int64, Field(strict=True)]
Line = Annotated[limits.Text, Field(json_schema_extra=limits.by_setting("max_input_chars"))]  # `_utterance` checks it
Value = bool | limits.Int64 | float | Annotated[str, Field(max_length=limits.MAX_DICTIONARY_CHARS)]
Parameters = Annotated[dict[limits.Name, Value], Field(max_length=64)]

router = APIRouter()


class Tensor(BaseModel):
    """An input. Its `data` are in lists, perhaps one inside of another, or follow the JSON as bytes."""

    shape: Few[Annotated[int, Field(gt=0, lt=1 << 31, strict=True)]]
    parameters: Parameters = {}

    @abstractmethod
    def value(self, binary: bytes | None) -> Any:
        """Return the text, the number or the samples (N,); ValueError unless they are of the type and the shape."""

    def _sized(self, values: Sized) -> Any:
        if len(values) != math.prod(self.shape):
            raise ValueError(f"{len(values)} values for the shape {self.shape}")
        return values


class Samples(Tensor):
    """The recording."""

    name: Literal["reference_wav"]
    datatype: Literal["FP32"]
    data: Wave | Few[Wave] = Field([], union_mode="left_to_right")

    def value(self, binary: bytes | None) -> np.ndarray:
        if binary is not None:
            return self._sized(np.frombuffer(binary, "<f4"))
        with np.errstate(over="ignore"):  # to infinity, which the checks of a recording refuse
            return self._sized(np.array(_flat(self.data)).astype("<f4"))


class Number(Tensor):
    """An integer."""

    name: Literal["reference_wav_len", "reference_sample_rate"]
    datatype: Literal["INT32"]
    data: Few[Integer] | Few[Few[Integer]] = Field([], union_mode="left_to_right")

    def value(self, binary: bytes | None) -> int:
        (number,) = self._sized(_flat(self.data) if binary is None else np.frombuffer(binary, "<i4"))
        return int(number)


class String(Tensor):
    """A text, as bytes after its length in four."""

    name: Literal["target_text", "reference_text", "speaker", "instruct_text"]
    datatype: Literal["BYTES"]
    data: Few[Line] | Few[Few[Line]] = Field([], union_mode="left_to_right")

    def value(self, binary: bytes | None) -> str:
        if binary is None:
            (text,) = self._sized(_flat(self.data))
            return str(text)
        if int.from_bytes(binary[:4], "little") != len(binary) - 4:
            raise ValueError("it is not one text with its length")
        return binary[4:].decode()


class Output(BaseModel):
    """What is wanted of the answer."""

    name: limits.Name
    parameters: Parameters = {}


class InferRequest(BaseModel):
    """The body of POST /v2/models/MODEL/infer."""

    inputs: Few[Annotated[Samples | Number | String, Field(discriminator="name")]]
    id: limits.Name = ""
    outputs: Few[Output] = []
    parameters: Parameters = {}


_INFER = doc.model(InferRequest)
_BINARY = {"application/octet-stream": doc.FILE}


@router.post(
    "/v2/models/{name}/infer",
    **doc.describe("Triton", body={doc.JSON: _INFER}, answer={"type": "object"}, content=_BINARY, errors=doc.SPEAKING),
)
async def infer(name: limits.PathName, request: Request) -> Response:
    """Return a model's whole answer to a request in Triton's protocol, and errors in Triton's form."""
    service = Service.of(request)
    try:
        async with service.dispatcher.upload_slot(request.headers.get("content-length")):
            body = await read_body(request)
            read = partial(_read, body, request.headers.get(HEADER_LENGTH), service.settings)
            wanted, utterance = await asyncio.to_thread(read)
        answer = SpeechAnswer((utterance,), len(utterance.target_text), name, API_KEY.get())
        parts = [part async for part in service.dispatcher.waveforms(answer)]
        return await asyncio.to_thread(_answer, name, np.concatenate(parts), wanted)
    except ApiError as error:
        headers = {"Retry-After": str(error.retry_after)} if error.retry_after else None
        return JSONResponse({"error": error.message}, error.status, headers)


def _read(body: bytes, header_length: str | None, settings: Settings) -> tuple[InferRequest, Utterance]:
    """Return a request, and that of a model in it. ApiError naming the input that is wrong."""
    length = len(body)
    if header_length is not None:
        if not header_length.isdecimal() or len(header_length) > 9 or int(header_length) > len(body):
            raise invalid(f"{HEADER_LENGTH} {header_length!r} of a body of {len(body)} bytes")
        length = int(header_length)
    head = body[:length]
    if head.count(b",") > limits.MAX_NUMBERS:
        raise ApiError(413, f"the request has more than {limits.MAX_NUMBERS} values")
    if head.count(b"[") + head.count(b"{") > settings.max_json_chars:  # an empty one takes half a kilobyte
        raise invalid(f"the request has more than {settings.max_json_chars} lists and objects")
    wanted: InferRequest = parse_json(InferRequest, head)
    values: dict[str, Any] = {}
    for each in wanted.inputs:
        size = each.parameters.get("binary_data_size")
        if size is not None and not (isinstance(size, int) and 0 <= size <= len(body) - length):
            raise invalid(f"binary_data_size {size!r} with {len(body) - length} bytes left")
        try:
            values[each.name] = each.value(None if size is None else body[length : length + int(size)])
        except ValueError as error:
            raise invalid(f"{each.name} cannot be read: {error}") from None
        length += int(size or 0)
    return wanted, _utterance(values, wanted.parameters, settings)


def _utterance(values: dict[str, Any], parameters: Mapping[str, Any], settings: Settings) -> Utterance:
    for name, value in values.items():
        if isinstance(value, str) and len(value) > settings.max_input_chars:
            raise invalid(f"{name} has more than {settings.max_input_chars} characters")
    if "target_text" not in values:
        raise invalid("the input target_text is missing")
    length = values.pop("reference_wav_len", None)
    if sequence := [name for name in parameters if name.startswith("sequence_")]:
        raise invalid(f"the parameter {sequence[0]!r}: text in pieces is for streams of gRPC, or the WebSocket")
    given = {
        name: str(value) if isinstance(value, float) else value
        for name, value in parameters.items()
        if name not in ("binary_data_output", "priority", "timeout")
    }
    with naming(None):
        if (wav := values.pop("reference_wav", None)) is not None:
            rate = values.setdefault("reference_sample_rate", PROMPT_SAMPLE_RATE)
            values["reference"] = validate_reference(wav, length, rate)
        return Utterance(parameters={**given, "played": False}, **values)


def _flat(values: list[Any]) -> list[Any]:
    return [each for inner in values for each in inner] if values and isinstance(values[0], list) else values


def _answer(model: str, waveform: np.ndarray, wanted: InferRequest) -> Response:
    of_output = [each.parameters.get("binary_data") for each in wanted.outputs if each.name == WAVEFORM]
    output: dict[str, Any] = {"name": WAVEFORM, "datatype": "FP32", "shape": [1, waveform.size]}
    head = {"model_name": model, "model_version": "1", **({"id": wanted.id} if wanted.id else {})}
    if not (of_output or [wanted.parameters.get("binary_data_output")])[0]:
        return JSONResponse({**head, "outputs": [{**output, "data": waveform.tolist()}]})
    data = waveform.astype("<f4").tobytes()
    header = json.dumps({**head, "outputs": [{**output, "parameters": {"binary_data_size": len(data)}}]}).encode()
    headers = {HEADER_LENGTH: str(len(header))}
    return Response(header + data, media_type="application/octet-stream", headers=headers)
