"""The HTTP client against a stub server with Triton's protocol and the responses that each test sets."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from cosyvoice_triton.cli import client_http
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.server.tritonserver import free_port

from tests.support.echo_server import echo_server
from tests.support.http_pages import Page, http_server

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


def command(url: str, output: Path, *more: str) -> list[str]:
    return ["--server-url", url, "--target-text", "你好", "--output-audio", str(output), *more]


def test_the_answer_is_written_as_a_16_bit_wav_at_24_khz(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "a.wav"
    answers = Answers(infer=waveform([0.25, -0.5]))
    with serving(answers) as url:
        assert client_http.main(command(url, output, "--seed", "3")) == 0
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
def test_every_failure_is_reported_in_one_line_with_a_non_zero_exit_code(answers, more, expected, tmp_path, capsys):
    with serving(answers) as url:
        assert client_http.main(command(url, tmp_path / "a.wav", *more)) == 1
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
            assert client_http.main(command(url, tmp_path / "a.wav")) == 1
            message = capsys.readouterr().err
            assert expected in message and message.count("\n") == 1
