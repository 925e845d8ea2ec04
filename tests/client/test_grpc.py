"""The gRPC client against a stub server with Triton's protocol and the responses that each test sets."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import soundfile as sf
from cosyvoice_triton.cli import client_grpc
from cosyvoice_triton.client import grpc_client
from cosyvoice_triton.client.utterance import Utterance, text_pieces
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.server.tritonserver import free_port
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from tests.support.speech_fixtures import stub_triton, until
from tests.support.triton_stub import TritonStub, texts_of

MODEL = TritonStub.model


def audio_response(waveform: np.ndarray) -> service_pb2.ModelStreamInferResponse:
    infer = service_pb2.ModelInferResponse(model_name=MODEL)
    infer.outputs.add(name="waveform", datatype="FP32", shape=list(waveform.shape))
    infer.raw_output_contents.append(waveform.astype(np.float32).tobytes())
    return service_pb2.ModelStreamInferResponse(infer_response=infer)


def error_response(message: str) -> service_pb2.ModelStreamInferResponse:
    return service_pb2.ModelStreamInferResponse(error_message=message)


@dataclass
class StubTriton(TritonStub):
    """`responses` are streamed, then `pause` seconds pass before the call ends."""

    responses: list[Any] = field(default_factory=list)

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's names
        self.requests.append(request)
        return self.responses[0].infer_response

    async def ModelStreamInfer(self, iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        try:
            async for request in iterator:
                self.requests.append(request)
                for response in self.responses:
                    yield response
                await asyncio.sleep(self.pause)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def command(address: str, output: Path, *more: str) -> list[str]:
    where = zip(("--server-addr", "--server-port"), address.split(":"), strict=True)
    return [*sum(where, ()), "--target-text", "你好", "--output-audio", str(output), *more]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """One second of stereo at 44.1 kHz."""
    path = tmp_path / "voice.wav"
    tone = np.sin(np.arange(44_100) * 0.05)
    sf.write(path, np.stack([tone, np.zeros_like(tone)], axis=1), 44_100)
    return path


def test_a_streamed_answer_is_written_and_its_latencies_are_printed(
    tmp_path: Path, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = np.full((1, 2400), 0.25, np.float32), np.full((1, 1200), -0.5, np.float32)
    triton = StubTriton(responses=[audio_response(first), audio_response(second)])
    output = tmp_path / "deep" / "speech.wav"
    with stub_triton(triton) as address:
        voice = ("--reference-audio", str(recording), "--reference-text", "hi")
        assert client_grpc.main(command(address, output, *voice, "--seed", "7", "--parameter", "sampling=triton")) == 0
    written, rate = sf.read(output, dtype="float32")
    assert rate == SAMPLE_RATE and sf.info(output).subtype == "PCM_16"
    np.testing.assert_allclose(written, np.concatenate([first[0], second[0]]), atol=1e-4)
    printed = capsys.readouterr().out
    assert "first chunk" in printed and "0.15 s in 2 chunk(s)" in printed
    request = triton.requests[0]
    sent = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in request.inputs}
    assert sent == {
        "reference_wav": ("FP32", [1, 44_100]),
        "reference_wav_len": ("INT32", [1, 1]),
        "reference_sample_rate": ("INT32", [1, 1]),
        "reference_text": ("BYTES", [1, 1]),
        "target_text": ("BYTES", [1, 1]),
    }
    assert request.parameters["seed"].int64_param == 7 and request.parameters["sampling"].string_param == "triton"


def test_a_speaker_an_instruction_and_the_cross_lingual_mode_are_sent_unchanged(tmp_path: Path) -> None:
    triton = StubTriton(responses=[audio_response(np.ones((1, 10)))])
    more = ("--speaker", "中文女", "--instruct-text", "Speak slowly.", "--cross-lingual")
    with stub_triton(triton) as address:
        assert client_grpc.main(command(address, tmp_path / "a.wav", *more)) == 0
    (request,) = triton.requests
    assert texts_of(request) == {"speaker": "中文女", "instruct_text": "Speak slowly.", "target_text": "你好"}
    assert request.parameters["cross_lingual"].bool_param


def test_an_offline_answer_is_written(tmp_path: Path) -> None:
    triton = StubTriton(responses=[audio_response(np.ones((1, 480)))], decoupled=False)
    with stub_triton(triton) as address:
        assert client_grpc.main(command(address, tmp_path / "a.wav", "--mode", "offline")) == 0
    assert sf.info(tmp_path / "a.wav").frames == 480


@pytest.mark.parametrize(
    ("triton", "more", "expected"),
    [
        (StubTriton(responses=[error_response("target_text is empty: '  '")]), (), "target_text is empty: '  '"),
        (StubTriton(responses=[]), (), "without audio"),
        (StubTriton(responses=[audio_response(np.zeros((1, 0)))]), (), "without audio"),
        (
            StubTriton(responses=[audio_response(np.ones((1, 9))), error_response("the LLM is down")]),
            (),
            "the LLM is down",
        ),
        (StubTriton(), ("--model-name", "unknown"), "does not serve the model 'unknown'"),
        (StubTriton(), ("--mode", "offline"), "is served for streaming"),
        (StubTriton(pause=30.0), ("--timeout", "0.3"), "raise --timeout"),
        (StubTriton(), ("--seed", str(1 << 63)), "seed 9223372036854775808 is not a 64-bit integer"),
        (StubTriton(), ("--instruct-text", "\udcff"), "instruct_text is not Unicode text"),
        (StubTriton(), ("--reference-audio", "/no/such.wav"), "cannot read the reference audio /no/such.wav"),
        (
            StubTriton(responses=[audio_response(np.ones((1, 9)))]),
            ("--output-audio", f"{__file__}/a.wav"),
            "cannot write",
        ),
    ],
)
def test_every_failure_is_reported_in_one_line_with_a_non_zero_exit_code(
    triton: StubTriton, more: tuple[str, ...], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub_triton(triton) as address:
        assert client_grpc.main(command(address, tmp_path / "a.wav", *more)) == 1
    message = capsys.readouterr().err
    assert expected in message and message.startswith("error: ") and message.count("\n") == 1
    assert not (tmp_path / "a.wav").exists()


def test_an_unreachable_server_is_reported_in_one_line_with_the_command_that_starts_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert client_grpc.main(command(f"127.0.0.1:{free_port()}", tmp_path / "a.wav")) == 1
    message = capsys.readouterr().err
    assert "no tritonserver answers" in message and "cosyvoice-triton serve" in message and message.count("\n") == 1


def test_cancelling_the_client_cancels_the_request_on_the_server() -> None:
    triton = StubTriton(responses=[audio_response(np.ones((1, 10)))], pause=30.0)

    async def cancel_early(address: str) -> None:
        request = Utterance("hello")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(grpc_client.synthesize(address, MODEL, request), 0.5)

    with stub_triton(triton) as address:
        asyncio.run(cancel_early(address))
        until(lambda: triton.cancelled == 1)


def test_closing_a_stream_cancels_its_request_while_the_connection_stays_open() -> None:
    stub = TritonStub()

    async def run(address: str) -> None:
        async with grpc_client.triton.InferenceServerClient(address) as connection:
            parts = grpc_client.chunks(connection, stub.model, Utterance("endless"), 600.0)
            await anext(parts)
            await parts.aclose()
            await asyncio.to_thread(until, lambda: stub.cancelled == 1)

    with stub_triton(stub) as address:
        asyncio.run(run(address))


def test_a_text_in_pieces_is_a_sequence_that_ends_with_its_last_piece() -> None:
    stub, pieces = TritonStub(), text_pieces()
    pieces.add("quick.")
    pieces.end()

    async def run(address: str) -> None:
        async with grpc_client.triton.InferenceServerClient(address) as connection:
            async for _ in grpc_client.chunks(connection, stub.model, Utterance("quick", pieces=pieces), 60.0):
                pass

    with stub_triton(stub) as address:
        asyncio.run(run(address))
    flags = [
        (one.parameters["sequence_start"].bool_param, one.parameters["sequence_end"].bool_param)
        for one in stub.requests
    ]
    assert flags == [(True, False), (False, False), (False, True)]
    assert len({one.parameters["sequence_id"].int64_param for one in stub.requests}) == 1


class RefusedEarly:
    """A connection whose call the server has ended before the request was sent."""

    def stream_infer(self, requests: object, stream_timeout: float, headers: object) -> "RefusedEarly":
        return self

    def __aiter__(self) -> "RefusedEarly":
        return self

    async def __anext__(self) -> object:
        metadata = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, metadata, metadata, details="Internal error from Core")

    def cancel(self) -> None:
        pass


def test_a_call_that_ends_before_its_request_is_sent_says_to_retry() -> None:
    async def run() -> None:
        async for _ in grpc_client.chunks(RefusedEarly(), MODEL, Utterance("Hello."), 60.0):
            pass

    with pytest.raises(InferenceServerException, match="retry"):
        asyncio.run(run())
