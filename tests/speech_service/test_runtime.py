"""The plain runtime's gRPC service with a stub Triton: keys, limits, errors, disconnects."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from cosyvoice_triton.server.tritonserver import free_port
from cosyvoice_triton.speech_service.routes.runtime_grpc import PROTO
from cosyvoice_triton.speech_service.settings import Settings

from tests.support.speech_fixtures import serving, stub_triton, until
from tests.support.triton_stub import TritonStub, texts_of

KEY = (("authorization", "Bearer key"),)


@pytest.fixture(scope="module")
def stub() -> TritonStub:
    return TritonStub()


@pytest.fixture(scope="module")
def client(stub: TritonStub) -> Iterator[Any]:
    """Its `Inference`."""
    _, services = grpc.protos_and_services(PROTO)
    port = free_port()
    settings = {"api_keys": ("key",), "max_streams": 1, "runtime_port": port}
    with stub_triton(stub) as address, serving(Settings(urls=(address,), **settings)):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield services.CosyVoiceStub(channel).Inference


def sft(text: str, voice: str = "zoe") -> Any:
    messages, _ = grpc.protos_and_services(PROTO)
    return messages.Request(sft_request={"spk_id": voice, "tts_text": text})


def test_speech_is_streamed(client: Any, stub: TritonStub) -> None:
    sizes = [len(response.tts_audio) for response in client(sft("Hello."), metadata=KEY, timeout=20)]
    assert sizes == [2 * stub.samples] * stub.chunks
    assert texts_of(stub.requests[-1]) == {"target_text": "Hello.", "speaker": "zoe"}


@pytest.mark.parametrize(
    ("request_", "metadata", "code", "words"),
    [
        (("Hello.",), (), grpc.StatusCode.UNAUTHENTICATED, ""),
        (("",), KEY, grpc.StatusCode.INVALID_ARGUMENT, ""),
        (("Hello.", "a" * 300), KEY, grpc.StatusCode.INVALID_ARGUMENT, "voice"),
        (("refuse",), KEY, grpc.StatusCode.INVALID_ARGUMENT, ""),
        (("lost",), KEY, grpc.StatusCode.UNAVAILABLE, ""),
        (("break",), KEY, grpc.StatusCode.INTERNAL, ""),
    ],
)
def test_an_error_ends_the_call_with_its_status(
    client: Any, request_: tuple[str, ...], metadata: Any, code: grpc.StatusCode, words: str
) -> None:
    with pytest.raises(grpc.RpcError) as error:
        list(client(sft(*request_), metadata=metadata, timeout=20))
    details = error.value.details()
    assert error.value.code() == code and details and words in details


def test_one_stream_too_many_is_rejected_and_a_cancelled_call_ends_its_stream(client: Any, stub: TritonStub) -> None:
    cancelled = stub.cancelled
    endless = client(sft("endless"), metadata=KEY, timeout=20)
    next(endless)
    with pytest.raises(grpc.RpcError) as error:
        list(client(sft("Hello."), metadata=KEY, timeout=20))
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    endless.cancel()
    until(lambda: stub.cancelled > cancelled and stub.live == 0, 10)


def test_calls_are_limited_and_idle_connections_are_closed(stub: TritonStub) -> None:
    _, services = grpc.protos_and_services(PROTO)
    port = free_port()
    states: list[grpc.ChannelConnectivity] = []
    settings = {"max_connections": 1, "idle": 0.5, "runtime_port": port}
    with stub_triton(stub) as address, serving(Settings(urls=(address,), **settings)):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            channel.subscribe(states.append)
            infer = services.CosyVoiceStub(channel).Inference
            endless = infer(sft("endless"), timeout=20)
            next(endless)
            with pytest.raises(grpc.RpcError) as error:
                list(infer(sft("Hello."), timeout=20))
            assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            until(lambda: states[-1] == grpc.ChannelConnectivity.READY, 5)  # told by another thread
            endless.cancel()
            until(lambda: states[-1] == grpc.ChannelConnectivity.IDLE, 5)
