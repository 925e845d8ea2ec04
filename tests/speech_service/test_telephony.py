"""Speech for telephones: paced frames, and the programs of docs/recipes/telephony.md with stand-ins of the switches."""

import base64
import json
import re
import socket as sockets
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.server.tritonserver import free_port
from cosyvoice_triton.speech_service.bodies import SpeechRequest
from cosyvoice_triton.speech_service.service import Service
from cosyvoice_triton.speech_service.settings import Settings
from websockets.sync.client import connect

from tests.conftest import ROOT
from tests.support.speech_fixtures import StubbedService, send
from tests.support.waiting import until

PAGE = (ROOT / "docs" / "recipes" / "telephony.md").read_text(encoding="utf-8")
TELEPHONE: dict[str, Any] = {"response_format": "mulaw", "frame_ms": 20, "pace": "realtime"}


def frames(served: StubbedService) -> int:
    return round(served.stub.chunks * served.stub.samples / SAMPLE_RATE / 0.02)


def test_frames_are_sent_when_they_are_played_over_http_and_the_websocket(served: StubbedService) -> None:
    least, begun = (frames(served) - 1) * 0.02, time.monotonic()
    assert served.post({"input": "Hello.", **TELEPHONE}).status_code == 200
    assert time.monotonic() - begun >= least
    with served.connect() as socket:
        send(socket, "session.config", **TELEPHONE)
        send(socket, "input.text", text="Hello.")
        send(socket, "input.done")
        times = [time.monotonic() for _ in iter(lambda: "session.done" in str(socket.recv(10)), True)]
    assert times[-1] - times[0] >= least
    error = served.post({"input": "Hello.", "pace": "realtime"}).json()["error"]
    assert error["param"] == "pace" and "needs frame_ms" in error["message"]
    service = Service(Settings(), cast(Any, None), cast(Any, None), cast(Any, None))
    asked = [SpeechRequest(input="Hello.", **TELEPHONE, stream=stream) for stream in (True, False)]
    assert [service.encoder(each).frame_seconds for each in asked] == [0.02, 0.0]


@contextmanager
def program(number: int, written: str, served: StubbedService, folder: Path) -> Iterator[int]:
    """The port at which a program of the page listens, with the addresses of the test."""
    port = free_port()
    code = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[number]
    for old, new in (("http://localhost:10086", served.url), (written, str(port)), ('"slt"', '"zoe"')):
        assert old in code
        code = code.replace(old, new)
    (folder / "telephone.py").write_text(code, encoding="utf-8")
    with subprocess.Popen([sys.executable, folder / "telephone.py"]) as process, sockets.socket() as probe:
        try:
            until(lambda: probe.connect_ex(("127.0.0.1", port)) == 0, 30)
            yield port
        finally:
            process.kill()


def test_asterisk_gets_frames_and_a_hang_up(served: StubbedService, tmp_path: Path) -> None:
    got: list[tuple[int, int]] = []
    with program(0, "9092", served, tmp_path) as port:
        with sockets.create_connection(("127.0.0.1", port), timeout=30) as call, call.makefile("rb") as heard:
            call.sendall(b"\x01\x00\x10" + bytes(16))  # the call's UUID
            while not got or got[-1][0]:
                kind, size = struct.unpack(">BH", heard.read(3))
                got.append((kind, len(heard.read(size))))
    assert got[-1] == (0, 0) and set(got[:-1]) == {(0x10, 320)}
    assert len(got) - 1 == pytest.approx(frames(served), abs=1)


def test_freeswitch_gets_a_file_to_play(served: StubbedService, tmp_path: Path) -> None:
    with program(1, "9093", served, tmp_path) as port, connect(f"ws://127.0.0.1:{port}/") as call:
        call.send(bytes(320))
        said = json.loads(call.recv(30))
    assert said["type"] == "streamAudio" and said["data"]["audioDataType"] == "raw"
    samples = len(base64.b64decode(said["data"]["audioData"])) // 2
    assert said["data"]["sampleRate"] == 8000 and samples == pytest.approx(160 * frames(served), abs=160)
