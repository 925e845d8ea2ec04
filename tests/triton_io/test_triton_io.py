"""Inputs, outputs, batches, and the error boundary of each request."""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cosyvoice_triton import triton_io
from cosyvoice_triton.errors import FatalError, UnavailableError
from cosyvoice_triton.monitoring import logs
from cosyvoice_triton.monitoring.health import Health, reported_failures

from tests.support.fake_triton import InferenceRequest, InferenceResponse, TritonError, TritonModelException
from tests.support.waiting import until


def request(decoupled: bool = False, **inputs: np.ndarray) -> InferenceRequest:
    return InferenceRequest.from_client(inputs, decoupled=decoupled)


def test_text_must_be_utf8():
    assert triton_io.scalar({"t": np.array([["你好".encode()]], object)}, "t") == "你好"
    with pytest.raises(ValueError, match="t is not UTF-8: byte 0xff at 1"):
        triton_io.scalar({"t": np.array([[b"a\xff"]], object)}, "t")


@pytest.mark.parametrize(
    "array",
    [
        np.array([[True]]),
        np.ones((1, 3, 80), np.float16),
        np.array([[2**63 + 1]], np.uint64),
        np.zeros((1, 0), np.int32),
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.broadcast_to(np.float32(1), (1, 4)),
        np.array([["a"]], object),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_become_tensors_with_the_same_values(array):
    tensor = triton_io.to_tensor("x", array)
    np.testing.assert_array_equal(tensor.as_numpy(), array)
    assert tensor.as_numpy().dtype == array.dtype


def respond(requests: list[InferenceRequest], compute: Callable[..., Any]) -> list[InferenceResponse]:
    return triton_io.respond_batch(requests, lambda r: triton_io.require(r, "x"), compute, model="m")


def double(requests: list[InferenceRequest]) -> tuple[list[InferenceResponse], list[int]]:
    """The responses with x doubled, and the batch size of each call of `compute`."""
    sizes: list[int] = []

    def compute(values: list[np.ndarray]) -> list[dict[str, np.ndarray]]:
        sizes.append(len(values))
        return [{"y": 2 * value} for value in values]

    return respond(requests, compute), sizes


def test_one_bad_request_does_not_fail_the_others_of_its_batch():
    responses, sizes = double([request(x=np.ones(1)), request(), request(x=np.full(1, 3.0))])
    assert [response.has_error() for response in responses] == [False, True, False]
    assert responses[2].arrays()["y"] == 6
    assert responses[1].error().code() == TritonError.INVALID_ARG and "x is missing" in responses[1].error().message()
    assert sizes == [2] and double([request()])[1] == []


@pytest.mark.parametrize("results", [[], None])
def test_a_failing_computation_answers_every_request_with_the_error(results):
    def compute(values: list[np.ndarray]) -> list[dict[str, np.ndarray]]:
        if results is None:
            raise RuntimeError("the network does not fit")
        return results

    responses = respond([request(x=np.ones(1)), request(x=np.ones(1))], compute)
    assert [response.error().code() for response in responses] == [TritonError.INTERNAL] * 2


def test_an_input_that_cannot_be_computed_fails_alone():
    def compute(values: list[np.ndarray]) -> list[dict[str, np.ndarray]]:
        if any(value[0] == 3 for value in values):
            raise RuntimeError("a bad recording")
        return [{"y": 2 * value} for value in values]

    responses = respond([request(x=np.full(1, float(n))) for n in range(5)], compute)
    assert [response.has_error() for response in responses] == [False, False, False, True, False]
    assert [r.arrays()["y"][0] for r in responses if not r.has_error()] == [0, 2, 4, 8]


@pytest.fixture(params=[True, False], ids=["decoupled", "one answer"])
def decoupled(request) -> bool:
    return request.param


@pytest.fixture
def serve(decoupled) -> Iterator[Callable[..., triton_io.RequestLoop]]:
    """`serve(handler)`: a request loop over it, closed after the test."""
    loops: list[triton_io.RequestLoop] = []

    def start(handler: triton_io.Handler) -> triton_io.RequestLoop:
        loops.append(triton_io.RequestLoop(handler, model="m", decoupled=decoupled))
        return loops[-1]

    yield start
    for loop in loops:
        loop.close()


def submit(loop: triton_io.RequestLoop, decoupled: bool):
    sent = request(decoupled)
    loop.submit(sent)
    return sent.sender


def ended(loop: triton_io.RequestLoop, decoupled: bool):
    sender = submit(loop, decoupled)
    until(lambda: sender.final)
    return sender


async def send_audio(sent, responder) -> None:
    responder.send({"waveform": np.ones((1, 4), np.float32)})


async def wait_forever(sent, responder) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("text is ''"), TritonError.INVALID_ARG),
        (UnavailableError("full"), TritonError.UNAVAILABLE),
        (asyncio.CancelledError(), TritonError.CANCELLED),
        (KeyError("x"), TritonError.INTERNAL),
    ],
)
def test_a_failing_handler_ends_its_request_with_an_error(serve, decoupled, error, code):
    async def fail(sent, responder) -> None:
        raise error

    sender = ended(serve(fail), decoupled)
    assert [response.error().code() for response in sender.responses] == [code]


def test_the_message_of_an_error_stays_short_enough_for_grpc(serve, decoupled):
    async def fail(sent, responder) -> None:
        raise ValueError(f"unknown speaker {'语' * 9000!r}")

    sender = ended(serve(fail), decoupled)
    message = sender.responses[-1].error().message()
    assert "unknown speaker" in message and len(message) < 550


def test_is_cancelled_is_not_called_after_the_final_response(serve, decoupled):
    kept: list[triton_io.Responder] = []

    async def keep(sent, responder) -> None:
        kept.append(responder)
        await send_audio(sent, responder)

    sender = ended(serve(keep), decoupled)
    assert [response.arrays()["waveform"].shape for response in sender.responses] == [(1, 4)]
    assert not kept[0].is_cancelled()
    assert not sender.cancellation_checked_after_final


def test_an_error_while_polling_one_request_does_not_stop_the_polling_of_others(serve, decoupled, caplog):
    loop = serve(wait_forever)
    odd, other = submit(loop, decoupled), submit(loop, decoupled)
    odd.is_cancelled = lambda: 1 / 0
    until(lambda: "cannot find out whether a client has disconnected" in caplog.text)
    other.cancelled = True
    until(lambda: other.final)
    assert other.responses[0].error().code() == TritonError.CANCELLED and not odd.final


def test_many_live_requests_are_asked_in_turn(serve, decoupled, monkeypatch):
    """Each check is a call to tritonserver: two a second for each request, and every client that goes is noticed."""
    monkeypatch.setattr("cosyvoice_triton.triton_io.requests.POLLED", 1)  # one at a time would take 70 s
    monkeypatch.setattr("cosyvoice_triton.triton_io.requests.CANCEL_POLL_SECONDS", 0.1)
    loop = serve(wait_forever)
    senders = [submit(loop, decoupled) for _ in range(700)]
    until(lambda: len(loop._live) == len(senders))
    asked = []
    for index, sender in enumerate(senders):
        sender.is_cancelled = lambda index=index: asked.append(index)
    begun = time.monotonic()
    until(lambda: len(set(asked)) == 700 and time.monotonic() > begun + 1.0)
    assert len(asked) <= 700 * (2 * (time.monotonic() - begun) + 2)
    for index, sender in enumerate(senders):
        sender.is_cancelled = lambda index=index: index % 9 == 0
    until(lambda: all(sender.final for sender in senders[::9]))
    assert not any(sender.final for index, sender in enumerate(senders) if index % 9)


def test_closing_answers_running_and_later_requests_with_unavailable(serve, decoupled):
    loop = serve(wait_forever)
    senders = [submit(loop, decoupled) for _ in range(3)]
    loop.end_requests()
    senders.append(submit(loop, decoupled))
    until(lambda: senders[-1].final)
    loop.close()
    senders.append(submit(loop, decoupled))
    assert all(sender.final for sender in senders)
    assert {sender.responses[0].error().code() for sender in senders} == {TritonError.UNAVAILABLE}


@pytest.mark.parametrize("decoupled", [False], indirect=True)
def test_a_model_that_is_not_decoupled_must_send_a_response(serve, decoupled):
    async def nothing(sent, responder) -> None:
        pass

    sender = ended(serve(nothing), decoupled)
    assert "sent no response" in sender.responses[0].error().message()


def test_a_request_whose_id_is_not_utf_8_is_answered(serve, decoupled, monkeypatch):
    sent = request(decoupled)
    monkeypatch.setattr(sent, "request_id", b"\xff".decode)
    serve(send_audio).submit(sent)
    until(lambda: sent.sender.final)
    assert "'utf-8' codec can't decode" in sent.sender.responses[0].error().message()


def test_a_request_whose_id_is_not_utf_8_can_be_answered_later(monkeypatch):
    sent = request(decoupled=False)
    monkeypatch.setattr(sent, "request_id", b"\xff".decode)
    triton_io.answer_later(sent, model="m")(np.ones(3, np.float32))
    assert sent.sender.final and sent.sender.responses[0].error() is None


def test_a_deferred_answer_that_cannot_be_sent_still_ends_the_request():
    sent = request()
    triton_io.answer_later(sent, model="m")(np.array(["no"]))  # a dtype that no tensor can hold
    assert sent.sender.final and [response.has_error() for response in sent.sender.responses] == [True]


def test_only_the_first_deferred_answer_is_sent():
    sent = request()
    with triton_io.answer_later(sent, model="m") as reply:
        pass
    assert not sent.sender.final
    reply(np.ones(3, np.float32))
    reply(ValueError("too late"))
    assert sent.sender.final and sent.sender.responses[0].arrays()["waveform"].shape == (1, 3)


def test_a_request_that_cannot_be_handed_over_is_answered_with_the_error():
    sent = request()
    with triton_io.answer_later(sent, model="m"):
        raise UnavailableError("the queue is full")
    assert sent.sender.responses[0].error().code() == TritonError.UNAVAILABLE


@pytest.mark.parametrize(
    "error", [FatalError("the engine is dead"), RuntimeError("CUDA error: an illegal memory access was encountered")]
)
def test_an_error_that_the_process_does_not_survive_is_reported_and_unavailable(published: Path, error: Exception):
    response = triton_io.error_response(error, "m")
    assert response.error().code() == TritonError.UNAVAILABLE
    assert response.error().message() == f"unavailable: m has failed and is restarted: {error}"
    assert reported_failures(published) == {"m": str(error)}


def test_a_failure_that_cannot_be_reported_is_still_answered(published: Path, caplog: pytest.LogCaptureFixture):
    published.rmdir()
    assert triton_io.error_response(FatalError("the engine is dead"), "m").error().code() == TritonError.UNAVAILABLE
    assert "cannot be reported" in caplog.text


def test_other_errors_are_not_reported(published: Path):
    for error in (RuntimeError("a bug"), UnavailableError("full"), ValueError("a bad value"), asyncio.CancelledError()):
        triton_io.error_response(error, "m")
    assert reported_failures(published) == {}


@pytest.mark.parametrize("error", [MemoryError("no memory"), torch.OutOfMemoryError("CUDA out of memory")])
def test_too_little_memory_is_unavailable_so_that_another_server_can_be_asked(published: Path, error: Exception):
    assert triton_io.error_response(error, "m").error().code() == TritonError.UNAVAILABLE
    assert reported_failures(published) == {}


def test_an_answer_proves_that_the_model_works_and_a_bug_makes_it_test_itself(monkeypatch: pytest.MonkeyPatch):
    tested: list[int] = []
    now = Health(lambda: 100.0)
    for module in ("errors", "requests"):
        monkeypatch.setattr(f"cosyvoice_triton.triton_io.{module}.health", now)
    for number, (error, answer, tests) in enumerate(
        (
            (ValueError("a bad value"), None, False),
            (RuntimeError("a bug"), None, True),
            (RuntimeError("a bug"), np.ones(1), False),
            (RuntimeError("a bug"), np.ones(0), True),
        )
    ):
        triton_io.error_response(error, "m")
        if answer is not None:
            triton_io.answer_later(request(x=np.ones(1)), model="m")(answer)
        now.test_if_due(lambda number=number: tested.append(number), "m")
        assert (number in tested) == tests


def test_lines_in_the_log_have_time_model_and_request(published: Path, monkeypatch: pytest.MonkeyPatch):
    root = logging.Logger("root")
    monkeypatch.setattr(logging, "root", root)
    monkeypatch.setenv("TTS_LOG_LEVEL", "DEBUG")
    logs.configure()
    (handler,) = root.handlers
    assert root.level == logging.DEBUG
    token = logs.request_id.set("r-1\nE1122 forged")
    record = logging.LogRecord("cosyvoice_triton.x", logging.ERROR, "", 1, "it failed: %s", ("why",), None)
    assert handler.filter(record)
    line = r"E\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ cosyvoice_triton\.x\] \['r-1\\nE1122 forged'\] it failed: why"
    assert re.fullmatch(line, handler.format(record))
    logs.request_id.reset(token)


@pytest.mark.parametrize("kind", [RuntimeError, TritonModelException, UnavailableError])
def test_a_full_shared_memory_is_unavailable_without_the_name_of_its_region(kind: type[Exception]) -> None:
    text = "Failed to increase the shared memory pool size for key 'tts_0123_7' to 67 bytes: No space left on device"
    error = triton_io.error_response(kind(text), "m").error()
    assert error.code() == TritonError.UNAVAILABLE
    assert error.message() == "unavailable: the server has no shared memory left (/dev/shm)"
