"""The plain runtime's gRPC service with a stub Triton: keys, limits, errors, requests that do not arrive."""

import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from cosyvoice_triton.server.tritonserver import free_port
from cosyvoice_triton.speech_service.routes.runtime_grpc import PROTO

from tests.support.speech_fixtures import stubbed, until
from tests.support.triton_stub import TritonStub, texts_of

METHOD = "/cosyvoice.CosyVoice/Inference"
SECONDS = 0.5  # receive_timeout of `address`
KEY = (("authorization", "Bearer key"),)


@pytest.fixture(scope="module")
def stub() -> TritonStub:
    return TritonStub()


@pytest.fixture(scope="module")
def address(stub: TritonStub) -> Iterator[str]:
    port = free_port()
    with stubbed(stub, api_keys=("key",), max_streams=1, runtime_port=port, receive_timeout=SECONDS):
        yield f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[Any]:
    """Its `Inference`."""
    _, services = grpc.protos_and_services(PROTO)
    with grpc.insecure_channel(address) as channel:
        yield services.CosyVoiceStub(channel).Inference


def sft(text: str, voice: str = "zoe") -> Any:
    messages, _ = grpc.protos_and_services(PROTO)
    return messages.Request(sft_request={"spk_id": voice, "tts_text": text})


def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as error:
        list(call)
    code: grpc.StatusCode = error.value.code()
    return code


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
    call = client(sft(*request_), metadata=metadata, timeout=20)
    assert code_of(call) == code and call.details() and words in call.details()


def test_one_stream_too_many_is_rejected_and_a_cancelled_call_ends_its_stream(client: Any, stub: TritonStub) -> None:
    cancelled = stub.cancelled
    endless = client(sft("endless"), metadata=KEY, timeout=20)
    next(endless)
    assert code_of(client(sft("Hello."), metadata=KEY, timeout=20)) == grpc.StatusCode.RESOURCE_EXHAUSTED
    endless.cancel()
    until(lambda: stub.cancelled > cancelled and stub.live == 0)


def test_calls_are_limited_and_idle_connections_are_closed(stub: TritonStub) -> None:
    _, services = grpc.protos_and_services(PROTO)
    port = free_port()
    states: list[grpc.ChannelConnectivity] = []
    with stubbed(stub, max_connections=1, idle=0.5, runtime_port=port):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            channel.subscribe(states.append)
            infer = services.CosyVoiceStub(channel).Inference
            endless = infer(sft("endless"), timeout=20)
            next(endless)
            assert code_of(infer(sft("Hello."), timeout=20)) == grpc.StatusCode.RESOURCE_EXHAUSTED
            until(lambda: states[-1] == grpc.ChannelConnectivity.READY)  # told by another thread
            endless.cancel()
            until(lambda: states[-1] == grpc.ChannelConnectivity.IDLE)


# --- requests that do not arrive --------------------------------------------------------------------------------


def unsent(channel: grpc.Channel, metadata: Any, seconds: float = 10.0) -> Any:
    """A call whose request is not sent while it lasts."""

    def nothing() -> Iterator[bytes]:
        time.sleep(4 * SECONDS)
        yield from ()

    return channel.stream_stream(METHOD)(nothing(), metadata=metadata, timeout=seconds)


def test_the_key_is_checked_before_the_request_is_read(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        assert code_of(unsent(channel, ())) == grpc.StatusCode.UNAUTHENTICATED


def test_a_request_that_does_not_arrive_in_time_ends_its_call(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        call = unsent(channel, KEY)
        assert code_of(call) == grpc.StatusCode.DEADLINE_EXCEEDED and "did not arrive within 0.5 s" in call.details()


def test_a_connection_has_twice_as_many_calls_as_there_are_streams(address: str) -> None:
    """The third one waits until another one ends, and others have a connection of their own."""
    _, services = grpc.protos_and_services(PROTO)
    with grpc.insecure_channel(address) as channel:
        held = [unsent(channel, KEY) for _ in range(2)]
        time.sleep(SECONDS / 4)  # they have been sent
        assert code_of(unsent(channel, (), SECONDS / 4)) == grpc.StatusCode.DEADLINE_EXCEEDED  # not UNAUTHENTICATED
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(address, options) as other:
            assert list(services.CosyVoiceStub(other).Inference(sft("Hello."), metadata=KEY, timeout=20))
        assert [code_of(call) for call in held] == [grpc.StatusCode.DEADLINE_EXCEEDED] * 2
