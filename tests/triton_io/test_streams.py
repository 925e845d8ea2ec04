"""Streams of another model of the same tritonserver, over a real gRPC endpoint in front of fake models."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from itertools import count

import numpy as np
import pytest
from cosyvoice_triton import triton_io
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.monitoring.environment import GRPC_ADDRESS
from cosyvoice_triton.server.tritonserver import free_port
from cosyvoice_triton.triton_io.streams import Streams

from tests.support.fake_grpc_server import FakeGrpcServer
from tests.support.fake_triton import InferenceRequest, InferenceResponse
from tests.support.waiting import until


def answer(number: int) -> InferenceResponse:
    return triton_io.to_response({"y": np.array([number])})


def read(**inputs: np.ndarray) -> list[int]:
    async def collect() -> list[int]:
        streams = Streams("m", ["y"])
        try:
            return [int(outputs["y"][0]) async for outputs in streams.ask(inputs, {"ras_window": "10"})]
        finally:
            await streams.aclose()

    return asyncio.run(collect())


def test_inputs_and_parameters_arrive_and_each_response_is_returned(triton_grpc, triton_models):
    sent = {
        "ids": np.array([[1, 2, 3]], np.int32),
        "seed": np.array([[2**63 + 1]], np.uint64),
        "streaming": np.array([[True]]),
        "temperature": np.array([[0.8]], np.float32),
    }
    seen = []

    def callee(request: InferenceRequest) -> Iterator[InferenceResponse]:
        seen.append(({tensor.name(): tensor.as_numpy() for tensor in request.inputs()}, triton_io.parameters(request)))
        yield from map(answer, range(3))

    triton_models["m"] = callee
    assert read(**sent) == [0, 1, 2]
    ((inputs, parameters),) = seen
    assert parameters == {"ras_window": "10"} and inputs.keys() == sent.keys()
    for name, array in sent.items():
        assert inputs[name].dtype == array.dtype
        np.testing.assert_array_equal(inputs[name], array)


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("kind", [ValueError, UnavailableError, RuntimeError])
def test_an_error_keeps_its_type_before_and_after_the_first_response(triton_grpc, triton_models, kind, before):
    failure = triton_io.error_response(kind("too many"), "m")
    triton_models["m"] = lambda request: [*map(answer, range(before)), failure]
    with pytest.raises(kind, match="^m: .*too many$"):
        read()


async def test_closing_the_generator_early_cancels_the_request(triton_grpc: FakeGrpcServer, triton_models):
    def callee(request: InferenceRequest) -> Iterator[InferenceResponse]:
        for number in count():  # until it is cancelled
            yield answer(number)
            time.sleep(0.01)

    triton_models["m"] = callee
    streams = Streams("m", ["y"])
    async with aclosing(streams.ask({}, {})) as responses:
        assert (await anext(responses))["y"] == 0
    await asyncio.to_thread(until, lambda: triton_grpc.live == 0)  # the connection is still open
    await streams.aclose()


def test_a_server_that_does_not_listen_is_unavailable(monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv(GRPC_ADDRESS, address)
    with pytest.raises(UnavailableError, match=f"m at {address}"):
        read()


def test_a_server_that_stops_during_a_stream_is_unavailable(triton_grpc: FakeGrpcServer, triton_models):
    def callee(request: InferenceRequest) -> Iterator[InferenceResponse]:
        yield answer(1)
        threading.Thread(target=triton_grpc.stop).start()
        ended.wait(60)

    ended, triton_models["m"] = threading.Event(), callee
    with pytest.raises(UnavailableError, match="m at 127.0.0.1"):
        read()
    ended.set()
