"""Calls and streams of other models of the same tritonserver: over the fake of Triton's API, and over a real gRPC
endpoint in front of fake models."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from itertools import count
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton import triton_io
from cosyvoice_triton.errors import ModelCallError, ModelDownError, OverloadedError, UnavailableError
from cosyvoice_triton.monitoring.environment import GRPC_ADDRESS
from cosyvoice_triton.server.tritonserver import free_port
from cosyvoice_triton.triton_io import calls
from cosyvoice_triton.triton_io.streams import Streams

from tests.support.fake_grpc_server import FakeGrpcServer
from tests.support.fake_triton import InferenceRequest, InferenceResponse, TritonError
from tests.support.waiting import until


def answer(**outputs: np.ndarray) -> InferenceResponse:
    return triton_io.to_response(outputs)


def ask(model: str = "m", **how: Any) -> dict[str, np.ndarray]:
    return asyncio.run(triton_io.call(model, {}, ["y"], **how))


@pytest.fixture(autouse=True)
def no_calls_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of other files leave threads behind whose fakes hang forever."""
    monkeypatch.setattr(calls, "_abandoned", set())


def test_a_call_returns_the_outputs_and_passes_the_sequence_id_and_flags(triton_models):
    seen = []

    def callee(sent: InferenceRequest) -> InferenceResponse:
        seen.append((sent.correlation_id(), sent.flags()))
        return answer(y=triton_io.require(sent, "x") + 1)

    triton_models["m"] = callee
    outputs = asyncio.run(triton_io.call("m", {"x": np.ones(2)}, ["y"], correlation_id=2**62, start=True, end=True))
    assert outputs["y"].tolist() == [2, 2]
    assert seen == [(2**62, 3)]


@pytest.mark.parametrize("kind", [ValueError, UnavailableError])
def test_an_error_keeps_its_type_between_models_although_triton_drops_its_code(triton_models, kind):
    def callee(sent: InferenceRequest) -> InferenceResponse:
        message = triton_io.error_response(kind("too many"), "m").error().message()
        return InferenceResponse(error=TritonError(message, TritonError.INTERNAL))

    triton_models["m"] = callee
    with pytest.raises(kind, match="^m: too many$"):
        ask()


def test_a_refusal_keeps_its_seconds_between_models(triton_models):
    refusal = triton_io.error_response(OverloadedError("9 listeners are served", 2.2), "m").error().message()
    assert refusal == "unavailable: overloaded, retry after 3 s: 9 listeners are served"
    triton_models["m"] = lambda sent: InferenceResponse(error=TritonError(refusal, TritonError.INTERNAL))
    with pytest.raises(OverloadedError, match="^m: 9 listeners are served$") as caught:
        ask()
    assert caught.value.retry_after == 3


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModelDownError, "Stub process 'm_0_0' is not healthy."),
        (ModelDownError, "Model m - Error when running inference: Server not ready"),
        (UnavailableError, "unavailable: the LLM server said: invalid request: x"),
        (ModelCallError, "m: KeyError: 'invalid request: x'"),
        (ModelCallError, "m: KeyError: 'unavailable: x'"),
        (ModelCallError, "m: KeyError: 'Server not ready'"),
    ],
)
def test_the_beginning_of_a_message_decides_the_type_of_an_error(triton_models, error, message):
    """A dead model and a server that is shutting down are unavailable."""
    triton_models["m"] = lambda sent: InferenceResponse(error=TritonError(message, TritonError.INTERNAL))
    with pytest.raises(error) as caught:
        ask()
    assert type(caught.value) is error


@pytest.mark.parametrize("model", ["m", "absent"])
def test_other_errors_of_a_call_are_internal(triton_models, model):
    triton_models["m"] = lambda sent: triton_io.error_response(KeyError("x"), "m")
    with pytest.raises(RuntimeError, match=f"{model}.*(KeyError|not ready)"):
        ask(model)


def test_an_empty_success_from_tritons_response_cache_is_an_error(triton_models):
    triton_models["m"] = lambda sent: InferenceResponse([])
    with pytest.raises(RuntimeError, match="m answered without y"):
        ask()


def test_calls_are_refused_while_too_many_are_stuck(triton_models, monkeypatch):
    monkeypatch.setattr(calls, "MAX_ABANDONED", 2)
    release = threading.Event()
    triton_models["hangs"] = lambda sent: answer() if release.wait(10) else answer()
    triton_models["good"] = lambda sent: answer(y=np.ones(1))
    for stuck in range(2):
        ask("good")  # an answered call does not count
        until(lambda stuck=stuck: len(calls._abandoned) == stuck)
        with pytest.raises(UnavailableError, match="hangs did not answer within 0.02 s"):
            ask("hangs", timeout=0.02)
    with pytest.raises(UnavailableError, match="2 calls of other models are stuck"):
        ask("good")
    release.set()
    until(lambda: not calls._abandoned)
    assert ask("good")["y"] == 1


def test_threads_are_kept_for_the_next_calls_up_to_a_number(triton_models, monkeypatch):
    monkeypatch.setattr(calls, "MAX_IDLE", 2)
    monkeypatch.setattr(calls, "_idle", [])
    threads, five = set[int](), threading.Barrier(5)

    def callee(sent: InferenceRequest) -> InferenceResponse:
        threads.add(threading.get_ident())
        five.wait(60)  # so that none of their threads is reused for another
        return answer(y=np.ones(1))

    async def five_calls() -> None:
        await asyncio.gather(*(triton_io.call("m", {}, ["y"]) for _ in range(5)))

    triton_models["m"] = callee
    asyncio.run(five_calls())
    until(lambda: len(calls._idle) == 2)
    kept = {worker.ident for worker in calls._idle}
    threads.clear()
    asyncio.run(five_calls())
    assert kept < threads


async def test_calls_beyond_the_slots_wait_for_their_turn(triton_models, monkeypatch):
    """Also after abandoned calls, which keep their slots, and if a waiting call was cancelled."""
    monkeypatch.setattr(calls, "_slots", asyncio.Semaphore(2))
    release, running, most = threading.Event(), [0], [0]

    def callee(sent: InferenceRequest) -> InferenceResponse:
        running[0] += 1
        most[0] = max(most[0], running[0])
        release.wait(10)
        running[0] -= 1
        return answer(y=np.ones(1))

    triton_models["m"] = callee
    abandoned = await asyncio.gather(
        *(triton_io.call("m", {}, ["y"], timeout=0.05) for _ in range(4)), return_exceptions=True
    )
    assert [type(error) for error in abandoned] == [UnavailableError] * 4
    waiting = [asyncio.ensure_future(triton_io.call("m", {}, ["y"])) for _ in range(8)]
    for _ in range(9):  # until they wait
        await asyncio.sleep(0)
    waiting[0].cancel()
    release.set()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert (sum(isinstance(found, dict) for found in answers)) == 7 and most[0] == 2


def test_a_call_whose_thread_cannot_be_started_releases_its_slot(triton_models, monkeypatch):
    def no_thread() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(calls, "_slots", asyncio.Semaphore(1))
    monkeypatch.setattr(calls, "_idle", [])
    triton_models["m"] = lambda sent: answer(y=np.ones(1))
    with monkeypatch.context() as broken:
        broken.setattr(calls, "_Worker", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            ask()
    assert ask(timeout=5)["y"] == 1


def answer_of(number: int) -> InferenceResponse:
    return answer(y=np.array([number]))


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
        seen.append((triton_io.read_all(request), triton_io.parameters(request)))
        yield from map(answer_of, range(3))

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
    triton_models["m"] = lambda request: [*map(answer_of, range(before)), failure]
    with pytest.raises(kind, match="^m: .*too many$"):
        read()


def test_closing_the_generator_early_cancels_the_request(triton_grpc: FakeGrpcServer, triton_models):
    def callee(request: InferenceRequest) -> Iterator[InferenceResponse]:
        for number in count():  # until it is cancelled
            yield answer_of(number)
            time.sleep(0.01)

    async def leave_after_the_first() -> None:
        streams = Streams("m", ["y"])
        async with aclosing(streams.ask({}, {})) as responses:
            assert (await anext(responses))["y"] == 0
        await asyncio.to_thread(until, lambda: triton_grpc.live == 0)  # the connection is still open
        await streams.aclose()

    triton_models["m"] = callee
    asyncio.run(leave_after_the_first())


def test_a_server_that_does_not_listen_is_unavailable(monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv(GRPC_ADDRESS, address)
    with pytest.raises(UnavailableError, match=f"m at {address}"):
        read()


def test_a_server_that_stops_during_a_stream_is_unavailable(triton_grpc: FakeGrpcServer, triton_models):
    def callee(request: InferenceRequest) -> Iterator[InferenceResponse]:
        yield answer_of(1)
        threading.Thread(target=triton_grpc.stop).start()
        ended.wait(60)

    ended, triton_models["m"] = threading.Event(), callee
    with pytest.raises(UnavailableError, match="m at 127.0.0.1"):
        read()
    ended.set()
