"""The gRPC and the HTTP client against stub servers with Triton's protocol and the responses that each test sets; the
Python API and `say`, with a stub Triton; a local server."""

import asyncio
import contextlib
import json
import shutil
import socket
import time
import wave
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import MagicMock

import grpc
import numpy as np
import pytest
import soundfile as sf
from cosyvoice_triton import Client, ClientError, Server, ServerError, api
from cosyvoice_triton.cli import client_grpc, client_http, say
from cosyvoice_triton.client import grpc_client
from cosyvoice_triton.client.utterance import Pieces, Utterance
from cosyvoice_triton.constants import MIN_REFERENCE_SECONDS, SAMPLE_RATE
from cosyvoice_triton.prepare import steps
from cosyvoice_triton.server.tritonserver import free_port
from tritonclient.utils import InferenceServerException

from tests.support.http_servers import Page, echo_server, http_server
from tests.support.sounds import recording
from tests.support.speech_fixtures import stub_triton, until
from tests.support.triton_stub import TritonStub, texts_of


def command(address: str, output: Path, *more: str, text: str = "你好") -> list[str]:
    where = zip(("--server-addr", "--server-port"), address.split(":"), strict=True)
    return [*sum(where, ()), "--target-text", text, "--output-audio", str(output), *more]


def test_a_streamed_answer_is_written_and_its_latencies_are_printed(tmp_path, capsys) -> None:
    stub, output = TritonStub(chunks=2, samples=1800), tmp_path / "deep" / "speech.wav"
    (tmp_path / "voice.wav").write_bytes(recording(1.0, 44_100, channels=2))
    with stub_triton(stub) as address:
        voice = ("--reference-audio", str(tmp_path / "voice.wav"), "--reference-text", "hi")
        assert client_grpc.main(command(address, output, *voice, "--seed", "7", "--parameter", "sampling=triton")) == 0
    written, rate = sf.read(output, dtype="float32")
    assert rate == SAMPLE_RATE and sf.info(output).subtype == "PCM_16"
    np.testing.assert_array_equal(written[1800:], written[:1800])
    assert np.abs(written).max() == pytest.approx(0.5, abs=0.01)
    printed = capsys.readouterr().out
    assert "first chunk" in printed and "0.15 s in 2 chunk(s)" in printed
    request = stub.requests[0]
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
    stub = TritonStub()
    more = ("--speaker", "中文女", "--instruct-text", "Speak slowly.", "--cross-lingual")
    with stub_triton(stub) as address:
        assert client_grpc.main(command(address, tmp_path / "a.wav", *more)) == 0
    (request,) = stub.requests
    assert texts_of(request) == {"speaker": "中文女", "instruct_text": "Speak slowly.", "target_text": "你好"}
    assert request.parameters["cross_lingual"].bool_param


def test_an_offline_answer_is_written(tmp_path: Path) -> None:
    stub = TritonStub(decoupled=False)
    with stub_triton(stub) as address:
        assert client_grpc.main(command(address, tmp_path / "a.wav", "--mode", "offline")) == 0
    assert sf.info(tmp_path / "a.wav").frames == stub.chunks * stub.samples


@pytest.mark.parametrize(
    ("text", "more", "expected"),
    [
        ("refuse", (), "target_text is refused"),
        ("silent", (), "without audio"),
        ("break", (), "token2wav broke"),
        ("你好", ("--model-name", "unknown"), "does not serve the model 'unknown'"),
        ("你好", ("--mode", "offline"), "is served for streaming"),
        ("stall", ("--timeout", "0.3"), "raise --timeout"),
        ("你好", ("--seed", str(1 << 63)), "seed 9223372036854775808 is not a 64-bit integer"),
        ("你好", ("--instruct-text", "\udcff"), "instruct_text is not Unicode text"),
        ("你好", ("--reference-audio", "/no/such.wav"), "cannot read the reference audio /no/such.wav"),
        ("你好", ("--output-audio", f"{__file__}/a.wav"), "cannot write"),
    ],
)
def test_every_failure_is_reported_in_one_line_with_a_non_zero_exit_code(text, more, expected, tmp_path, capsys):
    with stub_triton(TritonStub()) as address:
        assert client_grpc.main(command(address, tmp_path / "a.wav", *more, text=text)) == 1
    message = capsys.readouterr().err
    assert expected in message and message.startswith("error: ") and message.count("\n") == 1
    assert not (tmp_path / "a.wav").exists()


def test_an_unreachable_server_is_reported_in_one_line_with_the_command_that_starts_one(tmp_path, capsys) -> None:
    assert client_grpc.main(command(f"127.0.0.1:{free_port()}", tmp_path / "a.wav")) == 1
    message = capsys.readouterr().err
    assert "no tritonserver answers" in message and "cosyvoice-triton serve" in message and message.count("\n") == 1


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
    stub, pieces = TritonStub(), Pieces("".join)
    pieces.add("quick.")
    pieces.end()
    with stub_triton(stub) as address:
        asyncio.run(grpc_client.synthesize(address, stub.model, Utterance("quick", pieces=pieces)))
    sent = [one.parameters for one in stub.requests]
    flags = [(one["sequence_start"].bool_param, one["sequence_end"].bool_param) for one in sent]
    assert flags == [(True, False), (False, False), (False, True)]
    assert len({one["sequence_id"].int64_param for one in sent}) == 1


async def test_a_call_that_the_server_ends_before_its_request_is_sent_says_to_retry() -> None:
    connection, metadata = MagicMock(), grpc.aio.Metadata()
    ended = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, metadata, metadata, details="Internal error from Core")
    connection.stream_infer.return_value.__aiter__.side_effect = ended
    with pytest.raises(InferenceServerException, match="retry"):
        await anext(grpc_client.chunks(connection, TritonStub.model, Utterance("Hello."), 60.0))


MODEL = "cosyvoice2_dit"


@dataclass
class Answers:
    """The server's responses; `bodies` collects the requests."""

    status: int = 200
    infer: object = b""
    ready: int = 200
    decoupled: bool = False
    delay: float = 0.0
    bodies: list[bytes] = field(default_factory=list)


def waveform(values: list[float]) -> dict[str, object]:
    output = {"name": "waveform", "datatype": "FP32", "shape": [1, len(values)], "data": values}
    return {"model_name": MODEL, "outputs": [output]}


@contextlib.contextmanager
def serving(answers: Answers) -> Iterator[str]:
    class Handler(Page):
        def answer(self) -> None:
            if self.path.endswith("/ready"):
                return self.reply(answers.ready)
            if self.command == "GET":
                return self.reply(200, {"model_transaction_policy": {"decoupled": answers.decoupled}})
            answers.bodies.append(self.body())
            time.sleep(answers.delay)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client gave up
                self.reply(answers.status, answers.infer)

    with http_server(Handler) as server:
        yield server.url


def http_command(url: str, output: Path, *more: str) -> list[str]:
    return ["--server-url", url, "--target-text", "你好", "--output-audio", str(output), *more]


def test_the_answer_is_written_as_a_16_bit_wav_at_24_khz(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "a.wav"
    answers = Answers(infer=waveform([0.25, -0.5]))
    with serving(answers) as url:
        assert client_http.main(http_command(url, output, "--seed", "3")) == 0
    samples, rate = sf.read(output, dtype="float32")
    assert rate == SAMPLE_RATE and sf.info(output).subtype == "PCM_16"
    np.testing.assert_allclose(samples, [0.25, -0.5], atol=1e-4)
    assert "audio length" in capsys.readouterr().out
    head = answers.bodies[0]
    assert b'"seed":3' in head and "你好".encode() in head and b"reference_wav" not in head


@pytest.mark.parametrize(
    ("answers", "more", "expected"),
    [
        (Answers(status=400, infer={"error": "target_text is empty: '  '"}), (), "target_text is empty: '  '"),
        (Answers(infer=waveform([])), (), "without audio"),
        (Answers(ready=400), (), "does not serve the model 'cosyvoice2_dit'"),
        (Answers(decoupled=True), (), "client-grpc --mode streaming"),
        (Answers(delay=2.0), ("--timeout", "1"), "raise --timeout"),
        (Answers(), ("--reference-audio", __file__), f"cannot read the reference audio {__file__}"),
    ],
)
def test_every_failure_over_http_is_reported_in_one_line(answers, more, expected, tmp_path, capsys):
    with serving(answers) as url:
        assert client_http.main(http_command(url, tmp_path / "a.wav", *more)) == 1
    message = capsys.readouterr().err
    assert expected in message and message.startswith("error: ") and message.count("\n") == 1
    assert not (tmp_path / "a.wav").exists()


def test_an_address_without_a_server_is_reported_in_one_line(tmp_path, capsys) -> None:
    with echo_server() as foreign:
        for url, expected in (
            (f"http://127.0.0.1:{free_port()}", "no tritonserver answers"),
            ("http://no-such-host.invalid:8000", "no tritonserver answers"),
            (f"http://127.0.0.1:{foreign}", "no tritonserver answers"),  # a server of another protocol
            ("ftp://localhost", "must look like http://localhost:8000"),
            ("http://", "must look like http://localhost:8000"),
        ):
            assert client_http.main(http_command(url, tmp_path / "a.wav")) == 1
            message = capsys.readouterr().err
            assert expected in message and message.count("\n") == 1


def test_threads_that_are_more_than_the_places_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "RETRY_SECONDS", 0.02)
    stub = TritonStub(places=1, first=0.05)
    with stub_triton(stub) as address, Client(address) as client:
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(client.speak, 6 * ["Hello."]))
        assert {answer.size for answer in answers} == {stub.chunks * stub.samples} and stub.asked > stub.served == 6
        stub.places = 0
        monkeypatch.setattr(api, "RETRY_SECONDS", 120.0)
        with pytest.raises(ClientError, match="overloaded, retry after 3 s"):
            client.speak("Hello.", timeout=60)  # too short for another try


def test_a_closed_client_cancels_its_streams_and_nobody_waits_for_them() -> None:
    stub = TritonStub(pause=0.05)
    with stub_triton(stub) as address, ThreadPoolExecutor(1) as threads:
        with Client(address) as client:
            held, waiting = (client.stream("endless words") for _ in range(2))
            assert next(held).size and next(waiting).size
            rest = threads.submit(list, waiting)
        with pytest.raises(CancelledError):
            rest.result(60)
    assert stub.cancelled == 2


def test_language_and_pronunciations_are_sent_by_the_client_and_by_say(tmp_path: Path) -> None:
    stub, words = TritonStub(), tmp_path / "words.txt"
    words.write_text("nginx = engine x")
    with stub_triton(stub) as address, Client(address) as client:
        client.speak("Hallo nginx.", language="de", pronunciation={"nginx": "engine x"})
        options = ["--server", address, "--language", "de", "--output", str(tmp_path / "out.wav")]
        assert say.main(["Hallo nginx.", *options, "--pronunciation", str(words)]) == 0
        for request in stub.requests:
            assert request.parameters["language"].string_param == "de"
            assert json.loads(request.parameters["pronunciation"].string_param) == {"nginx": "engine x"}
        with pytest.raises(ValueError, match="pronunciation of 'nginx' must be text, not 3"):
            client.speak("Hallo nginx.", pronunciation={"nginx": 3})
        assert stub.served == 2


@pytest.mark.server
def test_a_local_server_has_the_demo_voice_and_stops_with_its_block(demo_voice, monkeypatch) -> None:
    monkeypatch.setattr(steps, "demo", lambda models, stack: shutil.copytree(demo_voice, models))
    settings = {"max_streams": "2", "flow_precision": "float32"}
    with Server(device="cpu", settings=settings) as server, Client(server.address) as client:
        usual = client.speak("Good morning.", seed=2).size
        assert usual > SAMPLE_RATE / 2
        assert client.speak("Good morning.", seed=2, speed=1.5).size == pytest.approx(usual / 1.5, rel=0.15)
        seconds = round(1.2 * usual / SAMPLE_RATE, 2)
        slow = client.speak("Good morning.", seed=2, duration=seconds)
        assert slow.size / SAMPLE_RATE == pytest.approx(seconds, rel=0.03)
        host, port = server.address.split(":")
    with pytest.raises(OSError):
        socket.create_connection((host, int(port)), 1.0)
    with pytest.raises(ServerError, match="with Server"):
        _ = server.address


def broken_off() -> Iterator[np.ndarray]:
    """Yield two chunks and the end of a server."""
    yield from (np.zeros(3, np.float32), np.zeros(1, np.float32))
    raise ClientError("the server has stopped")


def test_say_writes_chunks_as_they_come(tmp_path: Path) -> None:
    partial = tmp_path / "partial.wav"
    with pytest.raises(ClientError):
        say.write(broken_off(), partial)
    with wave.open(str(partial)) as file:
        assert file.getnframes() == 4
    loud = tmp_path / "loud.wav"
    say.write(iter([np.array([0.0, 2.0, -1.0], np.float32)]), loud)
    with wave.open(str(loud)) as file:
        assert np.frombuffer(file.readframes(3), "<i2").tolist() == [0, 32767, -32767]
    with pytest.raises(OSError, match=r"cannot write to .*Is a directory.*; choose another with --output"):
        say.write(iter([np.zeros(1, np.float32)]), tmp_path)


def test_values_that_cannot_be_sent_are_named_before_a_request() -> None:
    client = Client("127.0.0.1:9")
    try:
        with pytest.raises(ValueError, match=r"reference is int16 \(4,\)"):
            client.stream("Hello.", reference=np.zeros(4, np.int16))
        with pytest.raises(ClientError, match=r"cannot read the reference audio absent.wav"):
            client.stream("Hello.", reference="absent.wav")
        with pytest.raises(ClientError, match="no tritonserver answers at 127.0.0.1:9"):
            client.speak("Hello.", reference=np.zeros(int(MIN_REFERENCE_SECONDS * 16_000), np.float32))
    finally:
        client.close()
        client.close()
