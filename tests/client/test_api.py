"""The Python API and `say`, with a stub Triton; a local server."""

import json
import shutil
import socket
import wave
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from cosyvoice_triton import Client, ClientError, Server, ServerError, api
from cosyvoice_triton.cli import say
from cosyvoice_triton.constants import MIN_REFERENCE_SECONDS, SAMPLE_RATE
from cosyvoice_triton.prepare import steps

from tests.support.speech_fixtures import stub_triton
from tests.support.triton_stub import TritonStub


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
