"""The speech service over real sockets and as a process, with a stub Triton that fails on request."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.server.serving import serve
from cosyvoice_triton.server.tritonserver import ServerError, free_port
from cosyvoice_triton.speech_service import command as speech_command
from cosyvoice_triton.speech_service.settings import Settings
from cosyvoice_triton.speech_service.sidecar import speech_service
from cosyvoice_triton.speech_service.triton import Backend

from tests.support.speech_fixtures import (
    SPEECH,
    TEXT,
    StubbedService,
    answers,
    client_that_leaves,
    counted,
    events_of,
    serving,
    speech_process,
    stub_triton,
    stubbed,
    until,
)
from tests.support.triton_stub import OVERLOADED, TritonStub


def marked(samples: np.ndarray, rate: int) -> np.ndarray:
    """Stand in for a watermark."""
    return np.full(samples.size, rate / 2**16, np.float32)


def shortened(samples: np.ndarray, rate: int) -> np.ndarray:
    return samples[:-1]


@pytest.mark.parametrize("path", [SPEECH, "/inference_sft"])
def test_a_watermark_is_in_every_answer(path: str, tmp_path: Path) -> None:
    with stubbed(voices_dir=tmp_path, watermark=f"{__name__}:marked") as url:
        body = {"json": TEXT} if path == SPEECH else {"data": {"tts_text": "Hello.", "spk_id": "anna"}}
        samples = np.frombuffer(httpx.post(url + path, **body).content, "<i2")
        assert samples.size and set(samples) == {round(SAMPLE_RATE / 2**16 * 32767)}
    with stubbed(voices_dir=tmp_path, watermark=f"{__name__}:shortened") as url:
        assert httpx.post(url + path, **body).status_code == 500
    with pytest.raises(ValueError, match="watermark 'nowhere:f' cannot be imported"):
        Settings(watermark="nowhere:f")


@pytest.mark.parametrize(("words", "status"), [("refuse", 400), ("lost", 503), ("silent", 502)])
@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_an_error_before_the_first_byte_is_a_status(served, words, status, stream_format) -> None:
    answer = served.post({"input": words, "stream_format": stream_format})
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == ("invalid_request_error" if status == 400 else "server_error")
    assert ("retry-after" in answer.headers) == (status == 503)
    assert f'speech_errors_total{{status="{status}"}}' in served.metrics()


@pytest.mark.parametrize("name", ["pcm", "wav", "mp3"])
def test_an_error_after_the_first_byte_aborts_the_answer(served: StubbedService, name: str) -> None:
    got = b""
    with (
        pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"),
        httpx.stream("POST", served.url + SPEECH, json={**TEXT, "input": "break", "response_format": name}) as answer,
    ):
        assert answer.status_code == 200
        for part in answer.iter_raw():
            got += part
    assert got
    assert 'status="aborted"' in served.metrics()


def test_an_error_during_events_is_an_event(served: StubbedService) -> None:
    first, last = events_of(served.post({**TEXT, "input": "break", "stream_format": "sse"}))
    assert first["type"] == "speech.audio.delta"
    assert last["type"] == "speech.audio.error" and "token2wav broke" in last["error"]["message"]


@pytest.mark.parametrize("fault", [RuntimeError, asyncio.CancelledError])
def test_a_fault_of_ours_is_counted_as_a_500_and_not_as_a_client_that_left(served, monkeypatch, fault) -> None:
    def fail(*_: object) -> None:
        raise fault

    monkeypatch.setattr(Backend, "parts", fail)
    gone, errors = (counted(served.url, f'status="{status}"') for status in ("gone", "500"))
    assert served.post(TEXT).status_code == 500
    until(lambda: counted(served.url, 'status="500"') > errors)
    assert counted(served.url, 'status="gone"') == gone


def test_one_stream_too_many_is_answered_429_with_retry_after(served: StubbedService) -> None:
    with contextlib.ExitStack() as clients:
        for _ in range(4):
            clients.enter_context(client_that_leaves(served.url, {**TEXT, "input": "endless"}))
        until(lambda: "speech_live_streams 4.0" in served.metrics())
        answer = served.post(TEXT)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["type"] == "rate_limit_error"
    until(lambda: not counted(served.url, "speech_live_streams"))
    assert served.post(TEXT).status_code == 200


@pytest.mark.parametrize("body", [{}, {"items": []}, {"items": [{"input": "x"}] * 4}, {"items": "x"}])
def test_an_invalid_batch_is_rejected(served: StubbedService, body: Any) -> None:
    assert served.post(body, f"{SPEECH}/batch").status_code == 400


def test_without_a_triton_the_service_is_unavailable_until_one_starts(tmp_path: Path) -> None:
    stub, port = TritonStub(), free_port()
    with serving(Settings(urls=(f"127.0.0.1:{port}",), voices_dir=tmp_path)) as url:
        assert httpx.get(f"{url}/health").status_code == 503
        answer = httpx.post(url + SPEECH, json=TEXT)
        assert answer.status_code == 503 and "no Triton answers at 127.0.0.1" in answer.text
        assert httpx.get(f"{url}/v1/models").json()["data"] == []
        with stub_triton(stub, port):
            until(lambda: httpx.get(f"{url}/health").status_code == 200, 15)
            assert httpx.post(url + SPEECH, json=TEXT).status_code == 200


def test_answers_are_marked_as_made_by_a_machine_unless_the_operator_says_otherwise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mark 'no' is not on or off"):
        Settings(mark="no")
    with stub_triton(TritonStub()) as triton:
        for mark, marked in {"on": True, "off": False}.items():
            with serving(Settings(urls=(triton,), voices_dir=tmp_path, mark=mark)) as url:
                answer = httpx.post(url + SPEECH, json={**TEXT, "response_format": "wav"})
                assert ("x-ai-generated" in answer.headers) == marked
                assert (b"trainedAlgorithmicMedia" in answer.content) == marked


def test_streams_go_to_the_least_busy_triton_and_around_a_failing_one(tmp_path: Path) -> None:
    one, two = TritonStub(), TritonStub()
    with stub_triton(one) as first, stub_triton(two) as second:
        with serving(Settings(urls=(f"http://{first.rsplit(':')[0]}:{int(first.rsplit(':')[1]) - 1}", second))) as url:
            endless = {**TEXT, "input": "endless"}
            with httpx.stream("POST", url + SPEECH, json=endless) as answer:
                parts = answer.iter_raw()  # keep a reference: httpx closes the answer with it
                next(parts)
                # The endless stream is at the first; the next goes to the free second, then both are equally busy.
                with httpx.stream("POST", url + SPEECH, json=endless) as other:
                    others = other.iter_raw()
                    next(others)
                    assert httpx.post(url + SPEECH, json=TEXT).status_code == 200
            assert (one.served, two.served) == (2, 1)
            assert httpx.post(url + SPEECH, json={**TEXT, "input": "lost"}).status_code == 503
            assert (one.served, two.served) == (3, 2)  # both were tried


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        ("Request for unknown model: 'cosyvoice2_dit' is not found", 503, "1"),
        ("Request for unknown model: 'cosyvoice2_dit' version 1 is not at ready state", 503, "1"),
        ("Server is stopping, scheduler for model has stopped accepting new inference requests", 503, "1"),
        (OVERLOADED, 429, "3"),
    ],
)
def test_requests_go_around_a_triton_that_restarts_or_is_full(tmp_path, error, status, retry, decoupled) -> None:
    one, other = TritonStub(decoupled=decoupled, error=error), TritonStub(decoupled=decoupled)
    with stub_triton(one) as first, stub_triton(other) as second:
        with serving(Settings(urls=(first, second), voices_dir=tmp_path)) as url:
            assert httpx.post(url + SPEECH, json=TEXT).status_code == 200
            other.error = error
            answer = httpx.post(url + SPEECH, json=TEXT)
            assert (answer.status_code, answer.headers["retry-after"]) == (status, retry)
            if status == 429:
                told = {"message": "token2wav: 9 listeners are served", "type": "rate_limit_error", "param": None}
                assert answer.json()["error"] == {**told, "code": "overloaded"}


def test_models_that_are_not_decoupled_return_whole_answers(tmp_path: Path) -> None:
    stub = TritonStub(model="cosyvoice2", decoupled=False)
    with stubbed(stub, voices_dir=tmp_path) as url:
        assert len(httpx.post(url + SPEECH, json=TEXT).content) == 2 * stub.chunks * stub.samples
        assert httpx.post(url + SPEECH, json={**TEXT, "input": "refuse"}).status_code == 400
        served, cancelled = stub.served, stub.cancelled  # of a refusal the client knows before the stub
        with client_that_leaves(url, {**TEXT, "input": "stall"}):
            until(lambda: stub.served > served)
        until(lambda: stub.cancelled > cancelled)


def test_an_answer_that_takes_too_long_is_a_timeout(tmp_path: Path) -> None:
    with stubbed(timeout=0.3) as url:
        answer = httpx.post(url + SPEECH, json={**TEXT, "input": "stall"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (504, "timeout") and "--timeout" in error["message"]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/"])
def test_pages_that_are_watched_answer_options(served: StubbedService, path: str) -> None:
    options = httpx.options(served.url + path)
    assert options.status_code == 204 and "GET" in options.headers["allow"]


KEYS = ("first key", "second")


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    hosts, origins = ("localhost", "*.ours.example"), ("https://friend.example",)
    with stubbed(api_keys=KEYS, cors_origins=origins, allowed_hosts=hosts) as url:
        yield url


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "second"}, 401),
        ({"authorization": "Bearer second"}, 200),
        ({"authorization": "Bearer  second"}, 200),
        ({"authorization": "bearer   second"}, 200),
        ({"authorization": "Bearer second", "origin": "https://evil.example"}, 403),
        ({"authorization": "Bearer second", "origin": "https://friend.example"}, 200),
        ({"authorization": "Bearer second", "origin": "http://["}, 403),
        ({"authorization": "Bearer second", "host": "evil.example", "origin": "http://evil.example"}, 403),
        ({"authorization": "Bearer second", "host": "["}, 403),
        ({"authorization": "Bearer second", "host": "localhost:80", "origin": "http://localhost:80"}, 200),
        ({"authorization": "Bearer second", "host": "[::1]:80", "origin": "http://[::1]:80"}, 200),
        ({"authorization": "Bearer second", "host": "A.Ours.example:1"}, 200),
        ({"authorization": "Bearer second", "host": "ours.example.evil.example"}, 403),
        ({"authorization": "Bearer second", "host": "localhost.evil.example"}, 403),
    ],
)
def test_keys_and_foreign_pages(guarded: str, headers: dict[str, str], status: int) -> None:
    answer = httpx.post(guarded + SPEECH, json=TEXT, headers=headers)
    assert answer.status_code == status
    assert answer.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
    if headers.get("origin") == "https://evil.example":
        assert "SPEECH_CORS_ORIGINS=https://evil.example in the environment of `serve`" in answer.text
    if headers.get("origin") == "https://friend.example":
        assert answer.headers["access-control-allow-origin"] == "https://friend.example"


def test_preflight_requests_and_monitoring_need_no_key(guarded: str) -> None:
    names = "authorization,content-type,x-stainless-os,x-stainless-retry-count,openai-organization"  # of OpenAI's SDK
    headers = {"origin": "https://friend.example", "access-control-request-method": "POST"}
    headers |= {"access-control-request-headers": names, "access-control-request-private-network": "true"}
    answer = httpx.options(guarded + SPEECH, headers=headers)
    assert answer.status_code == 200 and answer.headers["access-control-allow-private-network"] == "true"
    assert set(names.split(",")) <= set(answer.headers["access-control-allow-headers"].replace(" ", "").split(","))
    for path in ("/", "/health", "/metrics", "/static/style.css"):
        assert httpx.get(guarded + path).status_code == 200, path
    for path in ("/v1/models", "/v1/audio/models", "/v1/audio/voices"):
        assert httpx.get(guarded + path).status_code == 401, path


def test_settings_are_read_from_the_environment_and_live_streams_end_after_sigterm() -> None:
    stub = TritonStub(chunks=10, pause=0.1)
    settings = {"SPEECH_API_KEYS": "a, b", "SPEECH_MAX_INPUT_CHARS": "20"}
    with stub_triton(stub) as address, speech_process("--url", address, **settings) as (url, process):
        key = {"authorization": "Bearer b"}
        assert httpx.post(url + SPEECH, json=TEXT).status_code == 401
        assert httpx.post(url + SPEECH, json={**TEXT, "input": "a" * 21}, headers=key).status_code == 400
        size = 0
        with httpx.stream("POST", url + SPEECH, json=TEXT, headers=key) as answer:
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
                server, seconds = SimpleNamespace(host="127.0.0.1"), {"notice_seconds": 0, "drain_seconds": 0}
                with pytest.raises(ServerError, match=f"port {port} is in use"):  # before models load
                    serve(server, health_port=0, announce=print, speech_port=port, **seconds)
            assert not answers(url) and not signalled.is_set()
        with speech_service("no address", tmp_path, "127.0.0.1", port):  # it ends by itself
            assert signalled.wait(60)
    finally:
        signal.signal(signal.SIGTERM, before)
