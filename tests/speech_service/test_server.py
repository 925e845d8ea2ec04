"""The speech service as a process: options, environment, shutdown, as a sidecar of a tritonserver, under load."""

import signal
import threading
from pathlib import Path

import httpx2 as httpx
import pytest
from cosyvoice_triton.server.tritonserver import ServerError, free_port
from cosyvoice_triton.speech_service import command as speech_command
from cosyvoice_triton.speech_service.sidecar import speech_service

from tests.support.speech_fixtures import answers, speech_process, stub_triton, until
from tests.support.triton_stub import TritonStub

BODY = {"input": "Hello.", "response_format": "pcm"}


def test_settings_are_read_from_the_environment_and_live_streams_end_after_sigterm() -> None:
    stub = TritonStub(chunks=10, pause=0.1)
    settings = {"SPEECH_API_KEYS": "a, b", "SPEECH_MAX_INPUT_CHARS": "20"}
    with stub_triton(stub) as address, speech_process("--url", address, **settings) as (url, process):
        speech, key = f"{url}/v1/audio/speech", {"authorization": "Bearer b"}
        assert httpx.post(speech, json=BODY).status_code == 401
        assert httpx.post(speech, json={**BODY, "input": "a" * 21}, headers=key).status_code == 400
        size = 0
        with httpx.stream("POST", speech, json=BODY, headers=key) as answer:
            for part in answer.iter_raw():
                size += len(part)
                process.send_signal(signal.SIGTERM)
        assert size == 2 * stub.chunks * stub.samples
        process.wait(60)
        assert not answers(url)


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("--url", "localhost", "'localhost' is not the address"),
        ("--url", "https://x:1", "not the address"),
        ("--max_streams", "0", "max_streams 0 is not positive"),
        ("--default_sample_rate", "12345", "default_sample_rate 12345 is not one of 8000"),
        ("--stall", "0", "stall 0.0 is not a positive number"),
        ("--voice_aliases", "=x", "voice_aliases '=x' is not ALIAS=VOICE"),
    ],
)
def test_an_invalid_option_is_one_line(option: str, value: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert speech_command.main([option, value]) == 1
    message = capsys.readouterr().err
    assert error in message and message.count("\n") == 1


def test_the_sidecar_starts_and_stops_with_the_block_and_signals_its_unexpected_end(tmp_path: Path) -> None:
    port, signalled = free_port(), threading.Event()
    url = f"http://127.0.0.1:{port}"
    before = signal.signal(signal.SIGTERM, lambda *_: signalled.set())
    try:
        with stub_triton(TritonStub()) as address:
            with speech_service(address, tmp_path, "127.0.0.1", port):
                until(lambda: answers(url), 60)
                with pytest.raises(ServerError, match=f"port {port} is in use"):
                    speech_service(
                        address, tmp_path, "127.0.0.1", port
                    )  # before its block, that is, before models load
            assert not answers(url) and not signalled.is_set()
        with speech_service("no address", tmp_path, "127.0.0.1", port):  # it ends by itself
            assert signalled.wait(60)
    finally:
        signal.signal(signal.SIGTERM, before)
