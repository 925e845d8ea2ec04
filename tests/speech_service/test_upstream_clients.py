"""Doors of upstream's clients with a stub Triton: the plain runtime over HTTP and gRPC, and Triton's HTTP protocol."""

import gzip
import json
import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx2 as httpx
import numpy as np
import pytest
import tritonclient.http as triton
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.server.tritonserver import free_port
from cosyvoice_triton.speech_service.routes.runtime_grpc import PROTO
from cosyvoice_triton.stacks import DEFAULT

from tests.support.sounds import recording
from tests.support.speech_fixtures import StubbedService, stubbed, until
from tests.support.triton_stub import TritonStub, arrays_of, texts_of

METHOD = "/cosyvoice.CosyVoice/Inference"
SECONDS = 0.5  # receive_timeout of `service`
KEY = (("authorization", "Bearer key"),)
MESSAGES, SERVICES = grpc.protos_and_services(PROTO)


@pytest.fixture(scope="module")
def stub() -> TritonStub:
    return TritonStub()


@pytest.fixture(scope="module")
def service(stub: TritonStub) -> Iterator[tuple[str, str]]:
    """The URL, and the address of the gRPC service."""
    port = free_port()
    with stubbed(stub, api_keys=("key",), max_streams=1, runtime_port=port, receive_timeout=SECONDS) as url:
        yield url, f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def client(service: tuple[str, str]) -> Iterator[Any]:
    """Its `Inference`."""
    with grpc.insecure_channel(service[1]) as channel:
        yield SERVICES.CosyVoiceStub(channel).Inference


def sft(text: str, voice: str = "zoe") -> Any:
    return MESSAGES.Request(sft_request={"spk_id": voice, "tts_text": text})


def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as error:
        list(call)
    code: grpc.StatusCode = error.value.code()
    return code


TEXT = {"tts_text": "Hello."}
PROMPT = recording(rate=PROMPT_SAMPLE_RATE)
# Fields of a request of each kind besides its text, whether it has a recording, and what Triton gets for them.
KINDS: list[tuple[str, dict[str, str], bool, dict[str, str]]] = [
    ("sft", {"spk_id": "zoe"}, False, {"speaker": "zoe"}),
    ("zero_shot", {"prompt_text": "Your call."}, True, {"reference_text": "Your call."}),
    ("cross_lingual", {}, True, {}),
    ("instruct", {"spk_id": "zoe", "instruct_text": "Slowly."}, False, {"speaker": "zoe", "instruct_text": "Slowly."}),
    ("instruct2", {"instruct_text": "Slowly."}, True, {"instruct_text": "Slowly."}),
]


def assert_sent(stub: TritonStub, texts: dict[str, str], recorded: bool) -> None:
    assert texts_of(stub.requests[-1]) == {"target_text": "Hello.", **texts}
    assert ("reference_wav" in {tensor.name for tensor in stub.requests[-1].inputs}) == recorded


@pytest.mark.parametrize(("kind", "fields", "recorded", "texts"), KINDS)
def test_the_http_clients_get_raw_samples_and_an_error_if_any_field_is_missing(
    service: tuple[str, str], stub: TritonStub, kind: str, fields: dict[str, str], recorded: bool, texts: dict[str, str]
) -> None:
    def ask(form: dict[str, str], files: dict[str, Any]) -> httpx.Response:
        method = "POST" if kind == "instruct2" else "GET"
        return httpx.request(method, f"{service[0]}/inference_{kind}", data=form, files=files, headers=dict(KEY))

    form, files = TEXT | fields, {"prompt_wav": ("prompt_wav", PROMPT)} if recorded else {}
    answer = ask(form, files)
    assert answer.status_code == 200 and len(answer.content) == 2 * stub.samples * stub.chunks, answer.text
    assert_sent(stub, texts, recorded)
    for name in form:
        refused = ask({other: value for other, value in form.items() if other != name}, files)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == name
    assert not files or ask(form, {}).status_code == 400


@pytest.mark.parametrize(("kind", "fields", "recorded", "texts"), KINDS[:4])
def test_the_grpc_clients_get_raw_samples(client, stub, kind, fields, recorded, texts) -> None:
    asked = TEXT | fields | ({"prompt_audio": PROMPT[44:]} if recorded else {})
    answers = client(MESSAGES.Request(**{f"{kind}_request": asked}), metadata=KEY, timeout=20)
    assert [len(answer.tts_audio) for answer in answers] == [2 * stub.samples] * stub.chunks
    assert_sent(stub, texts, recorded)


def test_the_wire_format_is_that_of_the_plain_runtime() -> None:
    """The bytes of requests of its clients."""
    request = MESSAGES.Request(zero_shot_request={"tts_text": "a", "prompt_text": "b", "prompt_audio": b"c"})
    assert request.SerializeToString() == b"\x12\x09\x0a\x01a\x12\x01b\x1a\x01c"
    request = MESSAGES.Request(instruct_request={"tts_text": "a", "spk_id": "b", "instruct_text": "c"})
    assert request.SerializeToString() == b"\x22\x09\x0a\x01a\x12\x01b\x1a\x01c"
    assert MESSAGES.Response(tts_audio=b"a").SerializeToString() == b"\x0a\x01a"


@pytest.mark.parametrize(
    ("asked", "code", "words"),
    [
        ({}, grpc.StatusCode.INVALID_ARGUMENT, "empty"),
        ({"cross_lingual_request": TEXT | {"prompt_audio": b"x"}}, grpc.StatusCode.INVALID_ARGUMENT, "16-bit samples"),
        ({"sft_request": {"tts_text": ""}}, grpc.StatusCode.INVALID_ARGUMENT, "empty"),
        ({"sft_request": TEXT | {"spk_id": "nobody"}}, grpc.StatusCode.INVALID_ARGUMENT, "unknown speaker"),
        ({"sft_request": TEXT | {"spk_id": "a" * 300}}, grpc.StatusCode.INVALID_ARGUMENT, "voice"),
        ({"sft_request": {"tts_text": "refuse"}}, grpc.StatusCode.INVALID_ARGUMENT, "is refused"),
        ({"sft_request": {"tts_text": "lost"}}, grpc.StatusCode.UNAVAILABLE, "down"),
        ({"sft_request": {"tts_text": "break"}}, grpc.StatusCode.INTERNAL, "broke"),
    ],
)
def test_an_error_ends_the_call_with_its_status(client, asked, code, words) -> None:
    call = client(MESSAGES.Request(**asked), metadata=KEY, timeout=20)
    assert code_of(call) == code and words in call.details()


def test_one_stream_too_many_is_rejected_and_a_cancelled_call_ends_its_stream(client: Any, stub: TritonStub) -> None:
    cancelled = stub.cancelled
    endless = client(sft("endless"), metadata=KEY, timeout=20)
    next(endless)
    assert code_of(client(sft("Hello."), metadata=KEY, timeout=20)) == grpc.StatusCode.RESOURCE_EXHAUSTED
    endless.cancel()
    until(lambda: stub.cancelled > cancelled and stub.live == 0)


def test_calls_are_limited_and_idle_connections_are_closed(stub: TritonStub) -> None:
    port = free_port()
    states: list[grpc.ChannelConnectivity] = []
    with stubbed(stub, max_connections=1, idle=0.5, runtime_port=port):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            channel.subscribe(states.append)
            infer = SERVICES.CosyVoiceStub(channel).Inference
            endless = infer(sft("endless"), timeout=20)
            next(endless)
            assert code_of(infer(sft("Hello."), timeout=20)) == grpc.StatusCode.RESOURCE_EXHAUSTED
            until(lambda: states[-1:] == [grpc.ChannelConnectivity.READY])  # told by another thread
            endless.cancel()
            until(lambda: states[-1] == grpc.ChannelConnectivity.IDLE)


def unsent(channel: grpc.Channel, metadata: Any, seconds: float = 10.0) -> Any:
    """A call whose request is not sent while it lasts."""

    def nothing() -> Iterator[bytes]:
        time.sleep(4 * SECONDS)
        yield from ()

    return channel.stream_stream(METHOD)(nothing(), metadata=metadata, timeout=seconds)


def test_the_key_is_checked_before_the_request_is_read(service) -> None:
    with grpc.insecure_channel(service[1]) as channel:
        assert code_of(unsent(channel, ())) == grpc.StatusCode.UNAUTHENTICATED


def test_a_connection_has_twice_as_many_calls_as_streams_and_a_request_must_arrive_in_time(service) -> None:
    """The third one waits until another one ends, and others have a connection of their own."""
    with grpc.insecure_channel(service[1]) as channel:
        held = [unsent(channel, KEY) for _ in range(2)]
        time.sleep(SECONDS / 4)  # they have been sent
        assert code_of(unsent(channel, (), SECONDS / 4)) == grpc.StatusCode.DEADLINE_EXCEEDED  # not UNAUTHENTICATED
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(service[1], options) as other:
            assert list(SERVICES.CosyVoiceStub(other).Inference(sft("Hello."), metadata=KEY, timeout=20))
        assert [code_of(call) for call in held] == [grpc.StatusCode.DEADLINE_EXCEEDED] * 2
        assert all("did not arrive within 0.5 s" in call.details() for call in held)


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


def rated(rate: int) -> dict[str, Any]:
    return tensor("reference_sample_rate", "INT32", [rate])


def test_the_request_of_upstreams_client_is_answered_with_numbers(served: StubbedService) -> None:
    answer = served.post(upstreams(), PATH).json()["outputs"][0]
    samples = served.stub.chunks * served.stub.samples
    assert (answer["name"], answer["shape"], len(answer["data"])) == ("waveform", [1, samples], samples)
    sent = served.stub.requests[-1]
    assert texts_of(sent) == {"target_text": "Hello.", "reference_text": "It says."}
    assert np.array_equal(arrays_of(sent)["reference_wav"][0], WAV)
    assert served.post(upstreams(reference_sample_rate=rated(24_000)), PATH).status_code == 200
    assert arrays_of(served.stub.requests[-1])["reference_sample_rate"] == 24_000


def test_tritons_client_gets_bytes_and_sends_parameters(served: StubbedService) -> None:
    wanted = Utterance("Hello.", reference=WAV, speaker=None, parameters={"seed": 7})
    with triton.InferenceServerClient(served.url.removeprefix("http://")) as client:
        result = client.infer(MODEL, wanted.tensors(triton.InferInput), parameters=wanted.parameters)
    assert result.as_numpy("waveform").shape == (1, served.stub.chunks * served.stub.samples)
    assert served.stub.requests[-1].parameters["seed"].int64_param == 7


BAD = {
    "brackets": b'{"target_text":' + b"[" * 200_000,
    "a shape that wraps to 0": upstreams(reference_wav=tensor("reference_wav", "FP32", [1, 2, 3], (1, 1 << 62))),
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
    "a rate that is not carried": upstreams(reference_sample_rate=rated(24_001)),
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
    beyond = {"inference-header-content-length": "9"}
    assert httpx.post(served.url + PATH, content=b"{}", headers=beyond).status_code == 400
