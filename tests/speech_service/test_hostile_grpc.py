"""The plain runtime's gRPC service: calls whose request does not arrive."""

import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from cosyvoice_triton.server.tritonserver import free_port
from cosyvoice_triton.speech_service.routes.runtime_grpc import PROTO
from cosyvoice_triton.speech_service.settings import Settings

from tests.support.speech_fixtures import serving, stub_triton
from tests.support.triton_stub import TritonStub

METHOD = "/cosyvoice.CosyVoice/Inference"
KEY = (("authorization", "Bearer key"),)
SECONDS = 0.5  # receive_timeout


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    port = free_port()
    settings = {"api_keys": ("key",), "receive_timeout": SECONDS, "runtime_port": port, "max_streams": 1}
    with stub_triton(TritonStub()) as triton, serving(Settings(urls=(triton,), **settings)):
        yield f"127.0.0.1:{port}"


def unsent(channel: grpc.Channel, metadata: Any, seconds: float = 10.0) -> Any:
    """A call whose request is not sent while it lasts."""

    def nothing() -> Iterator[bytes]:
        time.sleep(4 * SECONDS)
        yield from ()

    return channel.stream_stream(METHOD)(nothing(), metadata=metadata, timeout=seconds)


def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as error:
        list(call)
    code: grpc.StatusCode = error.value.code()
    return code


def test_the_key_is_checked_before_the_request_is_read(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        assert code_of(unsent(channel, ())) == grpc.StatusCode.UNAUTHENTICATED


def test_a_request_that_does_not_arrive_in_time_ends_its_call(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        call = unsent(channel, KEY)
        assert code_of(call) == grpc.StatusCode.DEADLINE_EXCEEDED and "did not arrive within 0.5 s" in call.details()


def test_a_connection_has_twice_as_many_calls_as_there_are_streams(address: str) -> None:
    """The third one waits until another one ends, and others have a connection of their own."""
    messages, services = grpc.protos_and_services(PROTO)
    wanted = messages.Request(sft_request={"spk_id": "zoe", "tts_text": "Hello."})
    with grpc.insecure_channel(address) as channel:
        held = [unsent(channel, KEY) for _ in range(2)]
        time.sleep(SECONDS / 4)  # they have been sent
        assert code_of(unsent(channel, (), SECONDS / 4)) == grpc.StatusCode.DEADLINE_EXCEEDED  # not UNAUTHENTICATED
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(address, options) as other:
            assert list(services.CosyVoiceStub(other).Inference(wanted, metadata=KEY, timeout=20))
        assert [code_of(call) for call in held] == [grpc.StatusCode.DEADLINE_EXCEEDED] * 2
