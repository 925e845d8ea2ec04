"""The speech service over real sockets, before a stub of Triton that fails when it is told to."""

import base64
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import soundfile as sf

from common.constants import SAMPLE_RATE
from common.server import free_port
from common.speech_service.settings import Settings
from scripts.bench.triton_stub import TritonStub, texts_of
from tests.speech_fixtures import serving, stub_triton, until

SPEECH = "/v1/audio/speech"
TEXT = {"input": "Hello.", "response_format": "pcm"}


@dataclass
class Served:
    """A service and the stub behind it."""

    url: str
    stub: TritonStub
    voices: Path

    def post(self, body: Any = None, path: str = SPEECH, **how: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=20, **how)

    def figures(self) -> str:
        return httpx.get(f"{self.url}/metrics").text

    def live(self) -> bool:
        return "speech_live_streams 0.0" not in self.figures()


def recording(seconds: float = 1.0, rate: int = SAMPLE_RATE, level: float = 0.3, kind: str = "WAV") -> bytes:
    """A sound file of a tone."""
    file = io.BytesIO()
    sf.write(file, level * np.sin(np.arange(int(seconds * rate)) * 0.05), rate, format=kind)
    return file.getvalue()


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    voices = tmp_path_factory.mktemp("voices")
    stub = TritonStub()
    with stub_triton(stub) as address:
        settings = Settings(urls=(address,), voices_dir=voices, max_streams=4, max_reference_mb=1, max_batch=3)
        with serving(settings) as url:
            yield Served(url, stub, voices)


BAD_BODIES = {
    "nothing": ({}, "input"),
    "no input": ({"model": "tts-1", "voice": "x"}, "input"),
    "input is a number": ({"input": 7}, "input"),
    "input is empty": ({"input": "  "}, "input"),
    "input is too long": ({"input": "a" * 4097}, "input"),
    "an unknown field": ({**TEXT, "voise": "anna"}, "voise"),
    "an unknown model": ({**TEXT, "model": "gpt-17"}, "model"),
    "a model that is a list": ({**TEXT, "model": ["tts-1"]}, "model"),
    "an unknown format": ({**TEXT, "response_format": "ogg"}, "response_format"),
    "a speed too high": ({**TEXT, "speed": 4.1}, "speed"),
    "a speed too low": ({**TEXT, "speed": 0}, "speed"),
    "a speed in words": ({**TEXT, "speed": "fast"}, "speed"),
    "an unknown stream format": ({**TEXT, "stream_format": "chunks"}, "stream_format"),
    "a rate that no player has": ({**TEXT, "sample_rate": 12_345}, "sample_rate"),
    "a rate that the format lacks": ({**TEXT, "response_format": "opus", "sample_rate": 44_100}, "sample_rate"),
    "a seed in words": ({**TEXT, "seed": "lucky"}, "seed"),
    "a temperature that is a list": ({**TEXT, "temperature": [1]}, "temperature"),
    "max_tokens with a fraction": ({**TEXT, "max_tokens": 1.5}, "max_tokens"),
    "a language that is none": ({**TEXT, "language": "<en>"}, "language"),
    "a voice that is a number": ({**TEXT, "voice": 3}, "voice.str"),
    "a voice object without an id": ({**TEXT, "voice": {"name": "anna"}}, "voice.str"),
    "the address of a recording": ({**TEXT, "ref_audio": "http://127.0.0.1:1/a.wav"}, "ref_audio"),
    "a recording that is not base64": ({**TEXT, "ref_audio": "????"}, "ref_audio"),
    "a recording that is no sound": ({**TEXT, "ref_audio": in_base64(b"RIFF" + bytes(900))}, "ref_audio"),
    "a recording too short": ({**TEXT, "ref_audio": in_base64(recording(0.3))}, "ref_audio"),
    "a recording too long": ({**TEXT, "ref_audio": in_base64(recording(31, 8000))}, "ref_audio"),
    "a silent recording": ({**TEXT, "ref_audio": in_base64(recording(level=0))}, "ref_audio"),
    "a recording at an odd rate": ({**TEXT, "ref_audio": in_base64(recording(1, 15_999))}, "ref_audio"),
    "a transcript of nothing": ({**TEXT, "ref_text": "Hello."}, "ref_text"),
    "a list": ([TEXT], None),
    "a text": ("hello", None),
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_a_bad_request_is_answered_in_openais_form_and_reaches_no_model(served: Served, case: str) -> None:
    body, param = BAD_BODIES[case]
    before = served.stub.served
    answer = served.post(body)
    error = answer.json()["error"]
    assert answer.status_code == (404 if case == "an unknown model" else 400), answer.text
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param
    assert error["type"] == "invalid_request_error" and error["message"]
    assert served.stub.served == before


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"input=", "application/x-www-form-urlencoded", 400),
        (b"nothing like it", "multipart/form-data; boundary=x", 400),
        (b"hello", "text/plain", 415),
        (bytes(4 << 20), "application/json", 413),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(served: Served, content: bytes, kind: str, status: int) -> None:
    answer = httpx.post(served.url + SPEECH, content=content, headers={"content-type": kind}, timeout=20)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_of_unannounced_length_is_cut_off_at_the_limit(served: Served) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(64):
            yield bytes(1 << 16)

    answer = httpx.post(served.url + SPEECH, content=endless(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


@pytest.mark.parametrize(("method", "path", "status"), [("GET", SPEECH, 405), ("GET", "/v1/nothing", 404)])
def test_a_wrong_path_or_method_is_answered_in_the_same_form(
    served: Served, method: str, path: str, status: int
) -> None:
    answer = httpx.request(method, served.url + path)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")


def test_fields_reach_the_model_under_its_own_names(served: Served) -> None:
    body = {**TEXT, "voice": {"id": "zoe"}, "instructions": "Slowly.", "seed": 3, "temperature": 0.5, "max_tokens": 9}
    answer = served.post(body, "/audio/speech")
    assert answer.status_code == 200 and len(answer.content) == 2 * served.stub.chunks * served.stub.samples
    assert answer.headers["content-type"] == "audio/pcm" and answer.headers["x-sample-rate"] == str(SAMPLE_RATE)
    request = served.stub.requests[-1]
    assert texts_of(request) == {"target_text": "Hello.", "speaker": "zoe", "instruct_text": "Slowly."}
    assert request.parameters["seed"].int64_param == 3 and request.parameters["max_tokens"].int64_param == 9
    assert request.parameters["temperature"].string_param == "0.5"


@pytest.mark.parametrize("form", [False, True], ids=["base64", "upload"])
@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_a_recording_of_any_kind_travels_with_its_words(served: Served, form: bool, kind: str) -> None:
    data = recording(2.0, 44_100, kind=kind)
    if form:
        fields = {"input": "Hello.", "response_format": "wav", "ref_text": "Hi.", "speed": "1.5"}
        answer = httpx.post(served.url + SPEECH, data=fields, files={"ref_audio": ("a", data)}, timeout=20)
    else:
        encoded = f"data:audio/x;base64,{in_base64(data)}"
        answer = served.post({"input": "Hello.", "ref_audio": encoded, "ref_text": "Hi.", "voice": "alloy"})
    assert answer.status_code == 200, answer.text
    request = served.stub.requests[-1]
    assert texts_of(request) == {"target_text": "Hello.", "reference_text": "Hi."}
    shapes = {tensor.name: list(tensor.shape) for tensor in request.inputs}
    assert shapes["reference_wav"][1] == pytest.approx(32_000, abs=2000)


@pytest.mark.parametrize(("words", "status"), [("refuse", 400), ("lost", 503), ("silent", 502)])
@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_an_error_before_the_first_byte_is_a_status(
    served: Served, words: str, status: int, stream_format: str
) -> None:
    answer = served.post({"input": words, "stream_format": stream_format})
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == ("invalid_request_error" if status == 400 else "server_error")
    assert ("retry-after" in answer.headers) == (status == 503)
    assert f'speech_errors_total{{status="{status}"}}' in served.figures()


@pytest.mark.parametrize("name", ["pcm", "wav", "mp3"])
def test_an_error_after_the_first_byte_breaks_the_answer_off(served: Served, name: str) -> None:
    got = b""
    with (
        pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"),
        httpx.stream("POST", served.url + SPEECH, json={**TEXT, "input": "break", "response_format": name}) as answer,
    ):
        assert answer.status_code == 200
        for part in answer.iter_raw():
            got += part
    assert got
    assert 'status="aborted"' in served.figures()


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]


def test_events_carry_the_audio_and_then_the_usage(served: Served) -> None:
    answer = served.post({**TEXT, "stream_format": "sse"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *deltas, done = events_of(answer)
    samples = served.stub.chunks * served.stub.samples
    audio = b"".join(base64.b64decode(event["audio"]) for event in deltas)
    assert {event["type"] for event in deltas} == {"speech.audio.delta"} and len(audio) == 2 * samples
    assert done["type"] == "speech.audio.done"
    assert done["usage"] == {"input_tokens": 6, "output_tokens": 15, "total_tokens": 21}


def test_an_error_amid_events_is_an_event(served: Served) -> None:
    first, last = events_of(served.post({**TEXT, "input": "break", "stream_format": "sse"}))
    assert first["type"] == "speech.audio.delta"
    assert last["type"] == "speech.audio.error" and "the vocoder broke" in last["error"]["message"]


@pytest.mark.parametrize("words", ["endless", "stall"])
def test_a_client_that_leaves_ends_the_work_within_a_second(served: Served, words: str) -> None:
    cancelled = served.stub.cancelled
    host, port = served.url.removeprefix("http://").split(":")
    body = json.dumps({**TEXT, "input": words})
    with socket.create_connection((host, int(port))) as client:
        head = f"POST {SPEECH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        client.sendall(f"{head}\r\n\r\n{body}".encode())
        until(lambda: served.stub.live > 0)
    assert until(lambda: served.stub.cancelled > cancelled and not served.live()) < 1.0
    assert 'status="gone"' in served.figures()


def test_one_stream_too_many_is_told_to_come_again(served: Served) -> None:
    def occupy() -> None:
        with httpx.stream("POST", served.url + SPEECH, json={**TEXT, "input": "endless"}, timeout=20) as answer:
            parts = answer.iter_raw()  # kept: httpx closes the answer with it
            next(parts)
            full.wait()

    full = threading.Barrier(5)
    threads = [threading.Thread(target=occupy) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: "speech_live_streams 4.0" in served.figures())
        answer = served.post(TEXT)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["type"] == "rate_limit_error"
    finally:
        full.wait()
        for thread in threads:
            thread.join()
    until(lambda: not served.live())
    assert served.post(TEXT).status_code == 200


def test_a_batch_answers_for_each_item(served: Served) -> None:
    items = [{"input": "One."}, {"input": "refuse"}, {"input": "Three.", "response_format": "wav"}]
    answer = served.post({"items": items, "response_format": "pcm", "voice": "zoe"}, f"{SPEECH}/batch").json()
    assert (answer["succeeded"], answer["failed"]) == (2, 1)
    first, second, third = answer["results"]
    assert len(base64.b64decode(first["audio_data"])) == 2 * served.stub.chunks * served.stub.samples
    assert second["status"] == "error" and second["error"]["message"] == "target_text is refused"
    assert third["media_type"] == "audio/wav"


def test_a_batch_ends_with_the_client_who_asked_for_it(served: Served) -> None:
    cancelled = served.stub.cancelled
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}{SPEECH}/batch", json={"items": [{"input": "stall"}] * 3}, timeout=0.5)
    until(lambda: served.stub.cancelled == cancelled + 3)


def test_a_damaged_voice_is_not_available_and_nobody_else_notices(served: Served) -> None:
    damaged = served.voices / "torn.safetensors"
    damaged.write_bytes(b"not safe")
    try:
        items = [{**TEXT, "voice": "torn"}, TEXT]
        assert served.post(items[0]).status_code == 503
        assert served.post({"items": items}, f"{SPEECH}/batch").json()["succeeded"] == 1
    finally:
        damaged.unlink()


@pytest.mark.parametrize("body", [{}, {"items": []}, {"items": [{"input": "x"}] * 4}, {"items": "x"}, {"items": [1]}])
def test_a_batch_that_is_none_is_refused(served: Served, body: Any) -> None:
    assert served.post(body, f"{SPEECH}/batch").status_code == 400


def test_a_voice_is_added_used_and_taken_away(served: Served) -> None:
    files = {"audio_sample": ("a.flac", recording(1.5, 48_000, kind="FLAC"))}
    answer = httpx.post(f"{served.url}/v1/audio/voices", data={"name": "zöe", "ref_text": "Hi."}, files=files)
    assert answer.status_code == 201 and answer.json()["seconds"] == 1.5, answer.text
    assert "zöe" in httpx.get(f"{served.url}/v1/audio/voices").json()["voices"]
    assert sf.info(served.voices / "zöe.wav").frames == 24_000 and (served.voices / "zöe.txt").read_text() == "Hi."
    again = httpx.post(f"{served.url}/v1/audio/voices", data={"name": "zöe"}, files=files)
    assert again.status_code == 409
    for more, texts in (
        ({}, {"reference_text": "Hi."}),
        ({"language": "zh"}, {}),
        ({"instructions": "Slowly."}, {"instruct_text": "Slowly."}),
    ):
        assert served.post({**TEXT, "voice": "zöe", **more}).status_code == 200
        assert texts_of(served.stub.requests[-1]) == {"target_text": "Hello.", **texts}
    assert httpx.delete(f"{served.url}/v1/audio/voices/zöe").json()["deleted"]
    assert list(served.voices.iterdir()) == []
    assert httpx.delete(f"{served.url}/v1/audio/voices/zöe").status_code == 404


@pytest.mark.parametrize(
    ("name", "data", "param"),
    [
        ("../up", recording(), "name"),
        ("", recording(), "name"),
        (".hidden", recording(), "name"),
        ("short", recording(0.2), "audio_sample"),
        ("noise", b"no sound at all", "audio_sample"),
        ("none", None, "audio_sample"),
        ("mute", recording(), "ref_text"),
    ],
)
def test_a_voice_that_cannot_be_one_is_refused(served: Served, name: str, data: bytes | None, param: str) -> None:
    fields = {"name": name, "ref_text": "?!" if name == "mute" else "Hi."}
    files = {"audio_sample": ("a.wav", data)} if data is not None else {"other": ("a", b"x")}
    answer = httpx.post(f"{served.url}/v1/audio/voices", data=fields, files=files)
    assert answer.status_code == 400 and answer.json()["error"]["param"] in (param, "other"), answer.text
    assert list(served.voices.iterdir()) == []


def test_without_a_triton_everything_says_so_and_heals_when_it_comes(tmp_path: Path) -> None:
    stub, port = TritonStub(), free_port()
    with serving(Settings(urls=(f"127.0.0.1:{port}",), voices_dir=tmp_path)) as url:
        assert httpx.get(f"{url}/health").status_code == 503
        answer = httpx.post(url + SPEECH, json=TEXT)
        assert answer.status_code == 503 and "no Triton answers at 127.0.0.1" in answer.text
        assert httpx.get(f"{url}/v1/models").json()["data"] == []
        with stub_triton(stub, port):
            until(lambda: httpx.get(f"{url}/health").status_code == 200, 15)
            assert httpx.post(url + SPEECH, json=TEXT).status_code == 200


def test_streams_go_to_whoever_has_least_to_do_and_around_one_that_fails(tmp_path: Path) -> None:
    one, two = TritonStub(), TritonStub(first=0.5)
    with stub_triton(one) as first, stub_triton(two) as second:
        with serving(Settings(urls=(f"http://{first.rsplit(':')[0]}:{int(first.rsplit(':')[1]) - 1}", second))) as url:
            threads = [threading.Thread(target=httpx.post, args=(url + SPEECH,), kwargs={"json": TEXT}) for _ in "ab"]
            with httpx.stream("POST", url + SPEECH, json={**TEXT, "input": "endless"}) as answer:
                parts = answer.iter_raw()  # kept: httpx closes the answer with it
                next(parts)
                for thread in threads:
                    thread.start()
                    time.sleep(0.1)
                for thread in threads:
                    thread.join()
            # The endless one is at the first; then the second is free, then they have as much to do.
            assert (one.served, two.served) == (2, 1)
            assert httpx.post(url + SPEECH, json={**TEXT, "input": "lost"}).status_code == 503
            assert (one.served, two.served) == (3, 2)  # both were asked


def test_offline_models_are_asked_for_whole_answers(tmp_path: Path) -> None:
    stub = TritonStub(model="cosyvoice2", decoupled=False)
    with stub_triton(stub) as address, serving(Settings(urls=(address,), voices_dir=tmp_path)) as url:
        assert len(httpx.post(url + SPEECH, json=TEXT).content) == 2 * stub.chunks * stub.samples
        assert httpx.post(url + SPEECH, json={**TEXT, "input": "refuse"}).status_code == 400
        cancelled = stub.cancelled
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + SPEECH, json={**TEXT, "input": "stall"}, timeout=0.5)
        until(lambda: stub.cancelled > cancelled)


def test_an_answer_that_takes_too_long_is_a_timeout(tmp_path: Path) -> None:
    with stub_triton(TritonStub()) as address, serving(Settings(urls=(address,), timeout=0.3)) as url:
        answer = httpx.post(url + SPEECH, json={**TEXT, "input": "stall"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")


def test_a_client_that_does_not_read_loses_its_stream(tmp_path: Path) -> None:
    stub = TritonStub(samples=20 * SAMPLE_RATE)
    with stub_triton(stub) as address, serving(Settings(urls=(address,), stall=0.5)) as url:
        with httpx.stream("POST", url + SPEECH, json={**TEXT, "input": "endless"}) as answer:
            assert answer.status_code == 200
            until(lambda: stub.served == 1 and stub.live == 0, 15)


KEYS = ("first key", "second")


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    with stub_triton(TritonStub()) as address:
        with serving(Settings(urls=(address,), api_keys=KEYS, cors_origins=("https://friend.example",))) as url:
            yield url


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "second"}, 401),
        ({"authorization": "Bearer second"}, 200),
        ({"authorization": "Bearer second", "origin": "https://evil.example"}, 403),
        ({"authorization": "Bearer second", "origin": "https://friend.example"}, 200),
    ],
)
def test_keys_and_foreign_pages(guarded: str, headers: dict[str, str], status: int) -> None:
    answer = httpx.post(guarded + SPEECH, json=TEXT, headers=headers)
    assert answer.status_code == status
    if headers.get("origin") == "https://friend.example":
        assert answer.headers["access-control-allow-origin"] == "https://friend.example"


def test_browsers_may_ask_without_a_key_and_so_may_machines_for_health(guarded: str) -> None:
    asking = {"origin": "https://friend.example", "access-control-request-method": "POST"}
    assert httpx.options(guarded + SPEECH, headers=asking).status_code == 200
    for path in ("/", "/health", "/metrics", "/static/style.css"):
        assert httpx.get(guarded + path).status_code == 200, path
    assert httpx.get(f"{guarded}/v1/models").status_code == 401


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"urls": ()}, "no address"),
        ({"urls": ("localhost",)}, "'localhost' is no address"),
        ({"urls": ("https://x:1",)}, "no address"),
        ({"max_streams": 0}, "max_streams 0"),
        ({"timeout": -1.0}, "timeout -1.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Settings(**wrong)
