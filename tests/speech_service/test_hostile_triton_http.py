"""Triton's offline requests over HTTP, answered by the speech service: what works, and what would crash Triton."""

import gzip
import json
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import tritonclient.http as triton
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.stacks import DEFAULT

from tests.support.speech_fixtures import StubbedService
from tests.support.triton_stub import texts_of

MODEL = DEFAULT.orchestrator
PATH = f"/v2/models/{MODEL}/infer"
WAV = np.random.default_rng(0).uniform(-0.5, 0.5, 16_000).astype(np.float32)


def tensor(name: str, datatype: str, data: Any, shape: tuple[int, ...] = (1, 1)) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


def upstreams(**changes: Any) -> dict[str, Any]:
    """The request of upstream's client_http.py: the recording as numbers in JSON."""
    inputs = {
        "reference_wav": tensor("reference_wav", "FP32", WAV[None].tolist(), (1, WAV.size)),
        "reference_wav_len": tensor("reference_wav_len", "INT32", [[WAV.size]]),
        "reference_text": tensor("reference_text", "BYTES", ["It says."]),
        "target_text": tensor("target_text", "BYTES", ["Hello."]),
    }
    return {"inputs": list((inputs | changes).values())}


def test_the_request_of_upstreams_client_is_answered_with_numbers(served: StubbedService) -> None:
    answer = served.post(upstreams(), PATH).json()["outputs"][0]
    samples = served.stub.chunks * served.stub.samples
    assert (answer["name"], answer["shape"], len(answer["data"])) == ("waveform", [1, samples], samples)
    sent = served.stub.requests[-1]
    assert texts_of(sent) == {"target_text": "Hello.", "reference_text": "It says."}
    assert np.array_equal(np.frombuffer(sent.raw_input_contents[0], np.float32), WAV)


def test_tritons_client_gets_bytes_and_sends_parameters(served: StubbedService) -> None:
    wanted = Utterance("Hello.", reference=WAV, speaker=None, parameters={"seed": 7})
    with triton.InferenceServerClient(served.url.removeprefix("http://")) as client:
        result = client.infer(MODEL, wanted.tensors(triton.InferInput), parameters=wanted.parameters)
    assert result.as_numpy("waveform").shape == (1, served.stub.chunks * served.stub.samples)
    assert served.stub.requests[-1].parameters["seed"].int64_param == 7


BAD = {
    "brackets": b'{"target_text":' + b"[" * 200_000,
    "a shape that wraps to 0": upstreams(
        reference_wav=tensor("reference_wav", "FP32", [1, 2, 3], (1, 4611686018427387904))
    ),
    "a negative shape": upstreams(reference_wav=tensor("reference_wav", "FP32", [1.0], (-1, -1))),
    "a text for numbers": upstreams(reference_wav=tensor("reference_wav", "FP32", ["a"], (1, 1))),
    "lists of unequal lengths": upstreams(reference_wav=tensor("reference_wav", "FP32", [[1.0], [1.0, 2.0]], (1, 3))),
    "another type": upstreams(target_text=tensor("target_text", "FP64", [1.0])),
    "numbers as text": upstreams(reference_wav=tensor("reference_wav", "FP32", ["0.5"] * 16_000, (1, 16_000))),
    "a parameter of a list": {**upstreams(), "parameters": {"seed": [1]}},
    "two texts": upstreams(target_text=tensor("target_text", "BYTES", ["a", "b"], (1, 2))),
    "numbers for a text": upstreams(target_text=tensor("target_text", "BYTES", [1])),
    "an input of another model": upstreams(tokens=tensor("tokens", "INT32", [1])),
    "no text": upstreams(target_text=tensor("reference_text", "BYTES", ["a"])),
    "more bytes than there are": {
        "inputs": [{**tensor("target_text", "BYTES", None), "parameters": {"binary_data_size": 1 << 40}}]
    },
    "no object": [1],
    "a sequence": {**upstreams(), "parameters": {"sequence_id": 5, "sequence_start": True}},
    "an infinite sample": upstreams(reference_wav=tensor("reference_wav", "FP32", [1e39] * 16_000, (1, 16_000))),
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_a_request_that_triton_could_not_read_is_refused_before_it(served: StubbedService, body: Any) -> None:
    before = served.stub.served
    answer = httpx.post(served.url + PATH, content=body if isinstance(body, bytes) else json.dumps(body), timeout=20)
    assert answer.status_code == 400 and isinstance(answer.json()["error"], str)
    assert served.stub.served == before


def test_a_body_that_is_compressed_or_has_too_many_values_is_refused(served: StubbedService) -> None:
    bomb = gzip.compress(bytes(64 << 20))
    assert httpx.post(served.url + PATH, content=bomb, headers={"content-encoding": "gzip"}).status_code == 415
    assert httpx.post(served.url + PATH, content=b"," * (1 << 21), timeout=20).status_code == 413
    assert (
        httpx.post(served.url + PATH, content=b"{}", headers={"inference-header-content-length": "9"}).status_code
        == 400
    )
