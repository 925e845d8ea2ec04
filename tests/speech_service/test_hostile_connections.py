"""Connections that offer what is not taken, or begin what they do not end, over raw sockets, with a stub Triton."""

import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest
from cosyvoice_triton.server.tritonserver import free_port
from cosyvoice_triton.speech_service.security.connection_limits import LimitedSocket

from tests.support.raw_connections import WEBSOCKET, frame, opened, request
from tests.support.speech_fixtures import SPEECH, TEXT, stubbed, until

KEY = b"Authorization: Bearer key\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA\r\n"
SECONDS = 1.0  # receive_timeout


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with stubbed(api_keys=("key",), receive_timeout=SECONDS, max_streams=4) as served:
        yield served


def answers(client: socket.socket) -> list[bytes]:
    """The status lines of all that the server sends until it has been silent for a while."""
    received = b""
    try:
        client.settimeout(60)  # until the first
        while data := client.recv(1 << 16):
            received += data
            client.settimeout(0.5)
    except (TimeoutError, ConnectionResetError):
        pass
    return re.findall(rb"HTTP/1\.1 \d[^\r\n]*", received)


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET, b"Connection: upgrade\r\nUpgrade: TLS/1.0, foo\r\n"])
@pytest.mark.parametrize("in_one_piece", [True, False])
def test_an_offer_to_upgrade_that_is_not_taken_is_ignored(url: str, offer: bytes, in_one_piece: bool) -> None:
    wanted = request(json.dumps({**TEXT, "stream": False}).encode(), KEY + offer)
    cut = len(wanted) if in_one_piece else wanted.index(b"\r\n\r\n") + 4
    with opened(url, wanted[:cut]) as client:
        client.sendall(wanted[cut:])
        assert answers(client) == [b"HTTP/1.1 200 OK"]
        client.sendall(request(json.dumps(TEXT).encode(), KEY))  # the connection can be used again
        assert answers(client) == [b"HTTP/1.1 200 OK"]


def test_a_body_in_chunks_is_read_after_an_offer(url: str) -> None:
    body = json.dumps({**TEXT, "stream": False}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n"
    headers = request(headers=KEY + H2C).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with opened(url, headers + chunks) as client:
        assert answers(client) == [b"HTTP/1.1 200 OK"]


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET])
def test_keys_and_limits_apply_to_requests_with_an_offer(url: str, offer: bytes) -> None:
    with opened(url, request(b"{}", offer)) as client:
        assert answers(client) == [b"HTTP/1.1 401 Unauthorized"]
    with opened(url, request(b"{}", KEY + offer, 99_999_999)) as client:
        assert [line[:12] for line in answers(client)] == [b"HTTP/1.1 413"]
    with opened(url, request(b"{}", KEY + offer, 100)) as client:
        while client.recv(1 << 16):  # closed once the body should have arrived
            pass


@pytest.mark.parametrize("path", ["/health", "/v1/audio/speech/stream", "/nowhere"])
def test_a_get_request_with_an_offer_is_answered_like_one_without(url: str, path: str) -> None:
    line = f"GET {path}"
    with opened(url, request(headers=KEY, line=line)) as client:
        expected = answers(client)
    with opened(url, request(headers=KEY + H2C, line=line)) as client:
        assert answers(client) == expected
    if not path.endswith("/stream"):
        with opened(url, request(headers=KEY + WEBSOCKET, line=line)) as client:
            assert answers(client) == expected


@pytest.mark.parametrize("data", [b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
def test_other_protocols_are_refused_at_once(url: str, data: bytes) -> None:
    with opened(url, data) as client:
        assert [line[:12] for line in answers(client)] == [b"HTTP/1.1 400"]


def socket_of(url: str, receive_buffer: int = 0) -> socket.socket:
    client = opened(url, request(headers=KEY + WEBSOCKET, line=f"GET {SPEECH}/stream"), receive_buffer)
    received = b""
    while not received.endswith(b"\r\n\r\n"):
        received += client.recv(1)
    assert received.startswith(b"HTTP/1.1 101")
    return client


def closed_with(client: socket.socket) -> int:
    """The code of the close frame that the server sends, after which it closes the connection; 0 for a reset, which a
    client gets that was still sending."""
    received = b""
    try:
        while data := client.recv(1 << 16):
            received += data
    except ConnectionError:
        return 0
    assert received[0] == 0x88, received[:20]
    return int(struct.unpack(">H", received[2:4])[0])


@pytest.mark.parametrize(
    "data", [frame(1, b"{", length=100), frame(1, b"{", fin=False), b"\x81"], ids=["frame", "fragment", "header"]
)
def test_a_message_that_does_not_end_in_time_closes_its_websocket(url: str, data: bytes) -> None:
    with socket_of(url) as client:
        client.sendall(data)
        assert closed_with(client) == 1008


def test_pings_are_no_unfinished_message(url: str) -> None:
    with socket_of(url) as client:
        for _ in range(8):
            client.settimeout(60)
            client.sendall(frame(9, b"x"))
            assert client.recv(3) == b"\x8a\x01x"
            client.settimeout(SECONDS / 4)
            with pytest.raises(TimeoutError):
                client.recv(1)


def test_of_two_clients_one_with_many_frames_takes_no_more_of_the_loop_than_the_other(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All frames have arrived before the loop reads the first of them."""
    handled: list[LimitedSocket] = []
    handle = LimitedSocket.handle_ping
    monkeypatch.setattr(LimitedSocket, "handle_ping", lambda socket: (handled.append(socket), handle(socket))[1])
    with socket_of(url) as greedy, socket_of(url) as modest:
        for client in (greedy, modest):
            client.sendall(frame(9, b""))
            assert client.recv(2) == b"\x8a\x00"
        first, second = handled
        held, go_on = threading.Event(), threading.Event()
        first.loop.call_soon_threadsafe(lambda: (held.set(), go_on.wait(60)))
        assert held.wait(60)
        handled.clear()
        greedy.sendall(frame(9, b"") * 9000)
        modest.sendall(frame(9, b"") * 900)
        go_on.set()
        until(lambda: len(handled) == 9900)
    last = max(number for number, socket in enumerate(handled) if socket is second)
    assert handled[:last].count(first) < 2 * 900


def test_unfinished_messages_share_a_budget(url: str) -> None:
    """It is that of one body with four streams; texts are served in the meantime."""
    half = 9 << 20
    with socket_of(url) as first, socket_of(url) as second:
        first.sendall(frame(1, b" " * half, length=half + 1))
        with contextlib.suppress(ConnectionError):  # it may be closed before all is sent
            second.sendall(frame(1, b" " * half, length=half + 1))
        assert closed_with(second) in (1013, 0)
        spoken = httpx.post(f"{url}{SPEECH}", json=TEXT, headers={"authorization": "Bearer key"})
        assert spoken.status_code == 200
    with socket_of(url) as client:  # what the others held is given back
        client.sendall(frame(1, b" " * half))
        assert b"characters besides letters" in client.recv(1 << 16)


def test_unfinished_bodies_share_a_budget_which_is_given_back(url: str) -> None:
    half = 9 << 20
    wanted = request(b" " * half, KEY)
    with opened(url, wanted[:-1]), opened(url, wanted[:-1]) as second:
        assert answers(second) == [b"HTTP/1.1 503 Service Unavailable"]
        spoken = httpx.post(f"{url}{SPEECH}", json=TEXT, headers={"authorization": "Bearer key"})
        assert spoken.status_code == 200
    key = {"authorization": "Bearer key"}
    until(lambda: httpx.post(f"{url}{SPEECH}", content=b" " * half, headers=key).status_code == 400)


def resident(process: int | str) -> int:
    """The bytes of a process's memory."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_of_half_sent_bodies_is_bounded_and_given_back() -> None:
    """In a process of its own. What it holds is compared with what was sent to it."""
    port, half, flood = free_port(), 9 << 20, 40
    command = [sys.executable, "-m", "cosyvoice_triton", "speech", "--url", "localhost:9", "--port", str(port)]
    with subprocess.Popen([*command, "--max_streams", "4", "--receive_timeout", "30"]) as service:

        def answers_at_all() -> bool:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 503
            except httpx.TransportError:
                return False

        def half_sent(_: int) -> socket.socket:
            client = opened(f"http://127.0.0.1:{port}", request(b" " * half, KEY)[: -half // 2])
            with contextlib.suppress(OSError):  # it is refused
                client.sendall(b" " * (half // 3))
            return client

        try:
            until(answers_at_all)
            before = resident(service.pid)
            for _ in range(2):
                with ThreadPoolExecutor(flood) as threads:  # each waits a second for a slot
                    clients = list(threads.map(half_sent, range(flood)))
                assert resident(service.pid) - before < flood * half / 4
                for client in clients:
                    client.close()
            until(lambda: answers_at_all() and resident(service.pid) - before < flood * half / 8)
        finally:
            service.terminate()


@pytest.mark.parametrize(
    "header",
    [*(b"Sec-WebSocket-Protocol: " + each for each in (b"a," * 10_000, b"\xff", b"a, \xe9"))]
    + [b"Transfer-Encoding: chunked", b"Content-Length: 5"],
    ids=["long", "byte", "letter", "chunked", "body"],
)
def test_a_handshake_that_cannot_be_read_is_answered(url: str, header: bytes, caplog: pytest.LogCaptureFixture) -> None:
    data = request(headers=KEY + WEBSOCKET, line=f"GET {SPEECH}/stream")
    with opened(url, data.replace(b"Content-Length: 0", header)) as client:
        assert [line[:10] for line in answers(client)] == [b"HTTP/1.1 4"]
    assert not [record for record in caplog.records if record.exc_info]


def test_a_message_that_is_no_utf8_closes_its_websocket_and_is_not_logged_as_our_error(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with socket_of(url) as client:
        client.sendall(frame(1, b'{"type": "input.text", "text": "\xed\xa0\x80"}'))
        assert closed_with(client) == 1007
    assert not [record for record in caplog.records if record.exc_info]


def test_requests_that_wait_for_answers_that_nobody_reads_are_few(url: str) -> None:
    wanted = request(headers=KEY, line="GET /health")
    with opened(url, wanted * 50) as client:
        assert answers(client) == [b"HTTP/1.1 200 OK"] * 50
    with opened(url, wanted * 3000) as client:
        assert len(answers(client)) < 1000


def test_pings_of_a_client_that_does_not_read_are_not_collected(url: str) -> None:
    with socket_of(url, receive_buffer=4096) as client:
        before, pings = resident("self"), frame(9, bytes(125)) * 1000
        with contextlib.suppress(ConnectionError):  # so many end the connection
            for _ in range(400):  # 52 MB
                client.sendall(pings)
        assert resident("self") - before < 25 << 20
