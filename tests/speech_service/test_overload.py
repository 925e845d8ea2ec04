"""More clients than places: refusals that cost nothing, and batches that wait for free ones, with a stub Triton."""

import asyncio
import contextlib
import json
import os
import re
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx2 as httpx
import pytest
from cosyvoice_triton import refusals
from cosyvoice_triton.client.answer import AudioPart
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.speech_service import bodies, dispatcher
from cosyvoice_triton.speech_service.answer import SpeechAnswer
from cosyvoice_triton.speech_service.audio.recordings import decode_base64
from cosyvoice_triton.speech_service.errors import ApiError
from cosyvoice_triton.speech_service.metrics import Metrics
from cosyvoice_triton.speech_service.routes import speech
from cosyvoice_triton.speech_service.service import Service
from cosyvoice_triton.speech_service.settings import Settings
from cosyvoice_triton.speech_service.triton import TritonPool
from cosyvoice_triton.speech_service.voices import VoiceFolder

from tests.support.raw_connections import opened, request
from tests.support.sounds import in_base64, recording
from tests.support.speech_fixtures import (
    SPEECH,
    TEXT,
    StubbedService,
    client_that_leaves,
    counted,
    service_with_stub,
    serving,
    stub_triton,
    stubbed,
    until,
)
from tests.support.triton_stub import OVERLOADED, TritonStub

CROWD = 64


def voice(seconds: float) -> str:
    return in_base64(recording(seconds, 44_100, kind="FLAC"))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[StubbedService]:
    with service_with_stub(tmp_path) as service:
        yield service


def test_after_a_refusal_nobody_elses_voice_is_decoded_nor_triton_asked(served, monkeypatch, caplog) -> None:
    monkeypatch.setattr(refusals, "REFUSAL_SECONDS", 60.0)
    monkeypatch.setattr(refusals, "LOG_SECONDS", 1.0)
    decoded: list[str] = []
    monkeypatch.setattr(bodies, "decode_base64", lambda text, size: decoded.append(text) or decode_base64(text, size))
    served.stub.error = OVERLOADED
    body = {**TEXT, "ref_audio": voice(1)}
    answers = [served.post(body) for _ in range(3)]
    answers.append(served.post(content=b"{"))
    assert [(each.status_code, each.headers["retry-after"]) for each in answers] == 4 * [(429, "3")]
    assert len(decoded) == served.stub.asked == 1
    assert 'speech_errors_total{status="429"} 4.0' in served.metrics()
    lines = re.compile(r"refused within 1 s: (\d) overloaded$", re.MULTILINE)
    until(lambda: sum(map(int, lines.findall("\n".join(caplog.messages)))) == 4)


def test_a_model_that_is_full_refuses_for_itself_alone(served: StubbedService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "REFUSAL_SECONDS", 60.0)
    other = TritonStub(model="cosyvoice2")
    with stub_triton(other) as free, stub_triton(served.stub) as full, serving(Settings(urls=(full, free))) as both:
        served.stub.error = OVERLOADED
        for _ in range(2):
            for model, status in ((served.stub.model, 429), ("", 429), (other.model, 200)):
                assert httpx.post(both + SPEECH, json={**TEXT, "model": model}).status_code == status


def test_a_connection_is_used_again_after_a_refusal_that_came_before_the_body(served: StubbedService) -> None:
    with httpx.Client() as client:
        served.stub.error = OVERLOADED
        for _ in range(5):
            answer = client.post(served.url + SPEECH, json={**TEXT, "ref_audio": "A" * (4 << 20)})
            assert answer.status_code in (400, 429)
            assert client.post(served.url + SPEECH, json=TEXT).status_code == 429
        served.stub.error = ""
        until(lambda: client.post(served.url + SPEECH, json=TEXT).status_code == 200)


def half_sent(url: str, body: bytes = b"", more: str = "", size: int = 1_000_000) -> socket.socket:
    """A connection with a request for a new voice, of which only the headers, with `more`, and `body` are sent."""
    return opened(url, request(body, more.encode(), size))


@pytest.fixture
def full() -> dispatcher.Dispatcher:
    """A dispatcher whose only Triton refuses every listener."""

    class Full:
        url, models = "", ("cosyvoice2",)

        async def parts(self, *request: object) -> AsyncIterator[AudioPart]:
            raise ApiError(429, "9 listeners are served", code="overloaded")
            yield

    backend = Full()
    pool = SimpleNamespace(
        models=backend.models, backends=[backend], lease=lambda *_: contextlib.nullcontext((backend, "cosyvoice2"))
    )
    return dispatcher.Dispatcher(cast(TritonPool, pool), Settings(), Metrics())


async def asked(full: dispatcher.Dispatcher) -> None:
    async for _ in full.waveforms(SpeechAnswer((Utterance("Hello."),), 6)):
        raise AssertionError("audio")


async def test_a_voice_that_waits_to_be_read_is_refused_like_the_others_however_long_that_takes(
    full: dispatcher.Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "REFUSAL_SECONDS", 0.0)
    service = Service(Settings(), cast(VoiceFolder, None), full.metrics, full)
    with pytest.raises(ApiError, match="9 listeners"):
        async with contextlib.AsyncExitStack() as readers:
            for _ in range(os.cpu_count() or 1):
                await readers.enter_async_context(full.decoding)
            waiting = asyncio.create_task(service.answer(bodies.parse(bodies.SpeechRequest, TEXT, Settings())))
            await asyncio.sleep(0)
            with pytest.raises(ApiError, match="9 listeners"):
                await asked(full)
        await waiting


async def test_of_a_crowd_only_the_first_are_routed_and_live_streams_run_after_each(full) -> None:
    routed = steps = 0

    async def live() -> None:
        nonlocal steps
        while True:
            steps += 1
            await asyncio.sleep(0)

    async def listen() -> None:
        nonlocal routed
        await full.admit()
        routed += 1
        await asked(full)

    other = asyncio.create_task(live())
    answers = await asyncio.gather(*(listen() for _ in range(CROWD)), return_exceptions=True)
    other.cancel()
    assert [getattr(each, "status", each) for each in (answers)] == CROWD * [429]
    assert routed < 4 and steps > CROWD / 2


@pytest.mark.parametrize(
    ("more", "size", "status"),
    [("", 1_000_000, 429), ("Expect: 100-continue\r\n", 1_000, 429), ("", 17_000_000, 413)],
    ids=["new voice", "client that asks first", "too large"],
)
def test_an_answer_before_the_body_ends_the_connection_once_the_body_has_come(
    served: StubbedService, monkeypatch: pytest.MonkeyPatch, more: str, size: int, status: int
) -> None:
    monkeypatch.setattr(refusals, "REFUSAL_SECONDS", 60.0)
    served.stub.error = OVERLOADED
    assert served.post(TEXT).status_code == 429
    with half_sent(served.url, more=more, size=size) as client:
        answer = b"".join(iter(lambda: client.recv(65_536), b""))  # to its end
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()) and b"\r\nconnection: close\r\n" in answer
        for _ in range(size // 1000):
            client.sendall(1000 * b"x")  # by a client that does not read yet: it gets no reset


def test_a_new_voice_that_waits_for_an_upload_slot_is_refused_by_its_headers_alone(served, monkeypatch) -> None:
    monkeypatch.setattr(refusals, "REFUSAL_SECONDS", 0.0)  # however long ago the refusal was
    monkeypatch.setattr(dispatcher, "UPLOAD_WAIT_SECONDS", 60.0)
    readers = [half_sent(served.url, b" " * 300_000) for _ in range(os.cpu_count() or 1)]
    httpx.get(f"{served.url}/health")  # came later: those before it have their slots now
    with half_sent(served.url) as waiting:
        httpx.get(f"{served.url}/health")  # and this one waits
        served.stub.error = OVERLOADED
        assert served.post(TEXT).status_code == 429  # a known voice waits for nobody
        for each in readers:
            each.close()
        assert waiting.recv(12) == b"HTTP/1.1 429"


def test_a_refusal_while_a_slow_client_sends_its_recording_does_not_refuse_it_when_places_are_free_again(
    served: StubbedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "REFUSAL_SECONDS", 0.0)
    body = json.dumps({**TEXT, "ref_audio": voice(1)}).encode()
    with half_sent(served.url, body[:-1], size=len(body)) as slow:
        httpx.get(f"{served.url}/health")  # came later: the other one has its slot now
        served.stub.error = OVERLOADED
        assert served.post(TEXT).status_code == 429
        served.stub.error = ""
        slow.sendall(body[-1:])
        assert slow.recv(12) == b"HTTP/1.1 200"


def test_slow_clients_hold_up_no_new_voice_for_long(served: StubbedService) -> None:
    readers = [half_sent(served.url, b" " * 300_000) for _ in range(2 * (os.cpu_count() or 1))]
    assert served.post({**TEXT, "ref_audio": voice(1)}).status_code == 200
    for each in readers:
        each.close()


def test_who_comes_after_a_listener_who_left_gets_the_place_that_is_not_free_yet(served, monkeypatch) -> None:
    """A Triton goes on with what it computes; so does this one, for a moment."""
    monkeypatch.setattr(dispatcher, "LEAVE_SECONDS", 60.0)
    monkeypatch.setattr(refusals, "REFUSAL_SECONDS", 60.0)  # of the one who came before the place became free
    with client_that_leaves(served.url, {**TEXT, "input": "endless"}):
        until(lambda: served.stub.live == 1)
        served.stub.places = 0
        assert served.post(TEXT).status_code == 429
    until(lambda: not counted(served.url, "speech_live_streams"))
    asked = served.stub.asked
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(served.post, TEXT)
        until(lambda: served.stub.asked > asked + 2)
        served.stub.places = 1
        assert answer.result().status_code == 200
    served.stub.places = 0
    assert served.post(TEXT).status_code == 429  # one left, and one came


def test_a_batch_waits_for_places(served: StubbedService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "RETRY_SECONDS", 0.02)
    served.stub.places, served.stub.first = 1, 0.05
    answer = served.post({"items": 6 * [TEXT]}, f"{SPEECH}/batch").json()
    assert (answer["succeeded"], answer["failed"]) == (6, 0)
    assert served.stub.served == 6 < served.stub.asked  # some were refused


def test_a_batch_waits_no_longer_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "RETRY_SECONDS", 0.02)
    with stubbed(TritonStub(error=OVERLOADED), timeout=2) as url:
        results = httpx.post(f"{url}{SPEECH}/batch", json={"items": [TEXT, TEXT]}, timeout=60).json()["results"]
    assert [each["error"]["code"] for each in results] == ["overloaded", "overloaded"]
