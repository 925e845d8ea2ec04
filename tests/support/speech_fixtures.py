"""Speech services on real sockets, in threads of the test process, and the Tritons they use."""

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
from cosyvoice_triton.background import BackgroundLoop
from cosyvoice_triton.server.tritonserver import free_port
from cosyvoice_triton.speech_service.command import http_server
from cosyvoice_triton.speech_service.settings import Settings
from websockets.sync.client import ClientConnection, connect

from tests.support.raw_connections import SPEECH, opened, request
from tests.support.server_requests import VOICE as RECORDING
from tests.support.server_requests import VOICE_TEXT
from tests.support.sounds import recording
from tests.support.triton_stub import TritonStub
from tests.support.waiting import until

VOICE = "anna"
TEXT = {"input": "Hello.", "response_format": "pcm"}


@contextlib.contextmanager
def speech_over(triton: str, voices: Path) -> Iterator[str]:
    """The URL of a service in front of the real tritonserver at an address. It registers VOICE through its own route,
    in a folder that is empty before and removed after."""
    shutil.rmtree(voices, ignore_errors=True)
    with serving(Settings(urls=(triton,), voices_dir=voices)) as url:
        files = {"audio_sample": (RECORDING.name, RECORDING.read_bytes())}
        words = {"name": VOICE, "ref_text": VOICE_TEXT}
        assert httpx.post(f"{url}/v1/audio/voices", data=words, files=files, timeout=60).status_code == 201
        yield url
    shutil.rmtree(voices)


@contextlib.contextmanager
def stub_triton(stub: TritonStub, port: int = 0) -> Iterator[str]:
    """The address of a running stub."""
    with contextlib.closing(BackgroundLoop("stub")) as loop:
        server, address = loop.run(stub.start(port=port))
        try:
            yield address
        finally:
            loop.run(server.stop(None))


@contextlib.contextmanager
def serving(settings: Settings) -> Iterator[str]:
    """http://host:port of a service that is ready."""
    port = free_port()
    server = http_server(dataclasses.replace(settings, port=port), drain_seconds=2)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        assert server.started
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@contextlib.contextmanager
def stubbed(stub: TritonStub | None = None, **settings: Any) -> Iterator[str]:
    """http://host:port of a service in front of a stub."""
    with stub_triton(stub or TritonStub()) as address, serving(Settings(urls=(address,), **settings)) as url:
        yield url


def answers(url: str) -> bool:
    """Whether a service answers, also if no Triton does."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health").status_code in (200, 503)
    return False


@contextlib.contextmanager
def speech_process(*options: str, **environment: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """http://host:port of a service in its own process, ready, and the process."""
    port = free_port()
    command = [sys.executable, "-m", "cosyvoice_triton", "speech", "--port", str(port), *options]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, env=os.environ | environment) as process:
        try:
            until(lambda: answers(url))
            yield url, process
        finally:
            process.terminate()


def counted(url: str, *words: str) -> float:
    """The sum of a service's metrics whose lines have all these words."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line[0] != "#" and all(word in line for word in words))


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]


def client_that_leaves(url: str, body: Any, key: str = "none") -> socket.socket:
    """Sends a request, and disconnects after a `with` block without having read an answer."""
    return opened(url, request(json.dumps(body).encode(), f"Authorization: Bearer {key}\r\n".encode()))


def send(socket: ClientConnection, kind: str, **fields: Any) -> None:
    socket.send(json.dumps({"type": kind, **fields}))


def receive(socket: ClientConnection, final: str) -> list[Any]:
    """All messages of a WebSocket up to one of the type `final`: dicts, and bytes for audio."""
    received: list[Any] = []
    while not received or not isinstance(received[-1], dict) or received[-1]["type"] != final:
        message = socket.recv(60)
        received.append(message if isinstance(message, bytes) else json.loads(message))
    return received


def ask(socket: ClientConnection, kind: str, final: str, **fields: Any) -> Any:
    """The first message of the type `final` after one that was sent."""
    send(socket, kind, **fields)
    return receive(socket, final)[-1]


def refused(socket: ClientConnection, kind: str, **fields: Any) -> Any:
    """The error that a message has."""
    return ask(socket, kind, "error", **fields)["error"]


def say(socket: ClientConnection, *pieces: str) -> list[Any]:
    """What a WebSocket answers to an utterance, whose text comes in pieces."""
    for piece in pieces:
        send(socket, "input.text", text=piece)
    send(socket, "input.done")
    return receive(socket, "session.done")


@dataclass
class StubbedService:
    """A service, and the stub that it uses."""

    url: str
    stub: TritonStub
    voices: Path

    def post(self, body: Any = None, path: str = SPEECH, **how: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **how)

    def add(self, name: str, data: bytes | None = None, **fields: str) -> httpx.Response:
        """Registers a voice with that file, or a tone."""
        files = {"audio_sample": ("a.wav", recording() if data is None else data)}
        return httpx.post(f"{self.url}/v1/audio/voices", data={"name": name, **fields}, files=files, timeout=20)

    def remove(self, name: str) -> httpx.Response:
        return httpx.delete(f"{self.url}/v1/audio/voices/{name}")

    def connect(self, path: str = f"{SPEECH}/stream", **how: Any) -> ClientConnection:
        """A WebSocket."""
        return connect(self.url.replace("http", "ws") + path, **how)

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics").text


@contextlib.contextmanager
def service_with_stub(voices: Path, stub: TritonStub | None = None, **settings: Any) -> Iterator[StubbedService]:
    """A service that uses a stub."""
    stub = stub or TritonStub()
    with stub_triton(stub) as address, serving(Settings(urls=(address,), voices_dir=voices, **settings)) as url:
        yield StubbedService(url, stub, voices)
