"""Connections of slow, huge, idle, hostile and vanishing clients, over raw sockets, with a stub Triton."""

import asyncio
import contextlib
import json
import logging
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator

import httpx2 as httpx
import psutil
import pytest
import uvicorn
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.speech_service.security.connection_limits import LimitedSocket
from cosyvoice_triton.speech_service.settings import Settings
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.support.raw_connections import WEBSOCKET, frame, opened, read_all, request
from tests.support.sounds import in_base64, recording
from tests.support.speech_fixtures import SPEECH, TEXT, counted, send, serving, stubbed, until
from tests.support.triton_stub import TritonStub

SECONDS = 0.5  # receive_timeout and idle
STUB = TritonStub(pause=0.4)  # an answer takes longer than both
KEY = b"Authorization: Bearer key\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA\r\n"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with stubbed(STUB, receive_timeout=SECONDS, idle=SECONDS, max_connections=8) as served:
        yield served


@pytest.mark.parametrize(
    "data",
    [b"", b"GET / HTTP/1.1\r\nHost:", request(b"{", length=100), request(b"{}") + b"POST "],
    ids=["nothing", "half of the headers", "half of the body", "half of a second request"],
)
def test_a_request_that_does_not_arrive_in_time_is_closed(url: str, data: bytes) -> None:
    started = time.monotonic()
    with opened(url, data) as client:
        read_all(client)
        # The loop's timers may fire a moment early: they count from the start of a turn of the loop.
        assert time.monotonic() - started > SECONDS / 2  # and within the 60 s of this socket


def test_an_idle_connection_is_kept_as_long_as_the_setting_says() -> None:
    assert Settings(urls=("localhost:1",)).keep_alive == 75  # uvicorn's 5 s are less than clients' pools expect
    with serving(Settings(urls=("localhost:1",), keep_alive=0.1)) as url:
        with opened(url, request(line="GET /health")) as client:
            read_all(client)


@pytest.mark.parametrize("lines", [1, 100], ids=["one header", "many headers"])
def test_headers_are_refused_at_the_limit(url: str, lines: int) -> None:
    header = b"x: " + b"a" * (66_000 // lines) + b"\r\n"
    with opened(url, b"GET / HTTP/1.1\r\n" + header * lines) as client:
        assert client.recv(12) == b"HTTP/1.1 431"


def test_a_large_body_may_arrive_with_its_headers_again_and_again(url: str) -> None:
    body = json.dumps({**TEXT, "ref_audio": in_base64(recording(10.0))}).encode()
    with opened(url) as client:
        for _ in range(2):
            client.sendall(request(body))
            assert client.recv(15) == b"HTTP/1.1 200 OK"
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                received += client.recv(1 << 16)


def test_clients_that_do_not_read_lose_their_streams_and_their_connections() -> None:
    stub, whole = TritonStub(samples=20 * SAMPLE_RATE), request(json.dumps({**TEXT, "stream": False}).encode())
    batch = request(json.dumps({"items": [TEXT] * 3}).encode()).replace(b"speech ", b"speech/batch ", 1)
    with stubbed(stub, stall=SECONDS) as served:
        clients = [opened(served, data, receive_buffer=4096) for data in (whole, batch)]
        clients.append(opened(served, request(json.dumps({**TEXT, "input": "endless"}).encode()), receive_buffer=4096))
        handshake = request(headers=WEBSOCKET, line=f"GET {SPEECH}/stream")
        clients.append(opened(served, handshake, receive_buffer=4096))
        assert clients[-1].recv(12) == b"HTTP/1.1 101"
        for message in ({"type": "input.text", "text": "Hello"}, {"type": "input.done"}):
            clients[-1].sendall(frame(1, json.dumps(message).encode()))
        try:
            ended = f'speech_requests_total{{route="{SPEECH}'
            until(lambda: counted(served, ended) == len(clients) and stub.live == 0)
            with pytest.raises(ConnectionError):  # the connection is gone, and not only the stream
                while clients[0].recv(1 << 16):
                    pass
        finally:
            for client in clients:
                client.close()


def test_answers_that_nobody_reads_share_a_budget_which_is_given_back() -> None:
    """It is that of one body of 3.3 MiB, and each answer has 7 MB, of which the system takes some itself."""
    stub, last = TritonStub(samples=50 * SAMPLE_RATE), b"Connection: close\r\n"
    whole = request(json.dumps({**TEXT, "stream": False}).encode(), last)
    size = 2 * stub.chunks * stub.samples
    with stubbed(stub, max_streams=4, max_reference_mb=1) as served:
        clients = [opened(served, whole, receive_buffer=4096) for _ in range(3)]
        until(lambda: stub.served == 3 and stub.live == 0)
        until(lambda: counted(served, f'speech_requests_total{{route="{SPEECH}') == 3)
        assert all(len(read_all(client)) < size for client in clients)
        for client in clients:
            client.close()
        with opened(served, whole.replace(b'"stream": false', b'"stream": true ')) as client:
            assert len(read_all(client)) > size


def test_a_request_over_the_limit_of_connections_is_answered_503(url: str) -> None:
    idle = [opened(url) for _ in range(8)]
    try:
        assert httpx.get(f"{url}/health").status_code == 503
    finally:
        for client in idle:
            client.close()
    until(lambda: httpx.get(f"{url}/health").status_code == 200)


def test_a_websocket_is_idle_only_when_nothing_is_spoken(url: str) -> None:
    with connect(url.replace("http", "ws") + f"{SPEECH}/stream") as client:
        started, kinds = time.monotonic(), []
        send(client, "input.text", text="Hello")
        send(client, "input.done")
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                message = client.recv(10)
                kinds.append("audio" if isinstance(message, bytes) else json.loads(message)["type"])
        assert kinds == ["audio.start", *["audio"] * STUB.chunks, "audio.done", "session.done"]
        assert time.monotonic() - started > (STUB.chunks - 1) * STUB.pause + SECONDS / 2
        assert closed.value.rcvd is not None and closed.value.rcvd.reason == "idle"


def test_clients_that_leave_are_no_errors(url: str, caplog: pytest.LogCaptureFixture) -> None:
    def gone() -> float:
        return counted(url, "speech_requests_total", 'status="gone"')

    before, (endless, stall) = gone(), (json.dumps({**TEXT, "input": word}).encode() for word in ("endless", "stall"))
    batch = request(b'{"items": [' + stall + b"]}").replace(b"speech ", b"speech/batch ", 1)
    with caplog.at_level(logging.WARNING):
        opened(url, request(b"{", length=100)).close()
        for data in (request(endless), request(stall), batch):
            with opened(url, data):
                until(lambda: STUB.live > 0)
            until(lambda: STUB.live == 0)
        for message in ({"type": "input.text", "text": "endless talk. And"}, {"type": "session.config"}):
            client = connect(url.replace("http", "ws") + f"{SPEECH}/stream")
            client.send(json.dumps(message))
            if "text" in message:
                client.recv(10)
            client.socket.close()
        until(lambda: STUB.live == 0 and "speech_live_sessions 0.0" in httpx.get(f"{url}/metrics").text)
        until(lambda: gone() == before + 4)
    assert [record.getMessage() for record in caplog.records] == []


UVICORN = "0.54.0"  # the release whose classes connection_limits.py was read from


def test_uvicorn_is_the_release_whose_private_classes_were_read() -> None:
    """At another one: compare LimitedProtocol and LimitedSocket with uvicorn's classes, then name it here."""
    assert uvicorn.__version__ == UVICORN


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    with stubbed(api_keys=("key",), receive_timeout=2 * SECONDS, max_streams=4) as served:
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
def test_an_offer_to_upgrade_that_is_not_taken_is_ignored(guarded: str, offer: bytes, in_one_piece: bool) -> None:
    wanted = request(json.dumps({**TEXT, "stream": False}).encode(), KEY + offer)
    cut = len(wanted) if in_one_piece else wanted.index(b"\r\n\r\n") + 4
    with opened(guarded, wanted[:cut]) as client:
        client.sendall(wanted[cut:])
        assert answers(client) == [b"HTTP/1.1 200 OK"]
        client.sendall(request(json.dumps(TEXT).encode(), KEY))  # the connection can be used again
        assert answers(client) == [b"HTTP/1.1 200 OK"]


def test_a_body_in_chunks_is_read_after_an_offer(guarded: str) -> None:
    body = json.dumps({**TEXT, "stream": False}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n"
    headers = request(headers=KEY + H2C).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with opened(guarded, headers + chunks) as client:
        assert answers(client) == [b"HTTP/1.1 200 OK"]


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET])
def test_keys_and_limits_apply_to_requests_with_an_offer(guarded: str, offer: bytes) -> None:
    with opened(guarded, request(b"{}", offer)) as client:
        assert answers(client) == [b"HTTP/1.1 401 Unauthorized"]
    with opened(guarded, request(b"{}", KEY + offer, 99_999_999)) as client:
        assert [line[:12] for line in answers(client)] == [b"HTTP/1.1 413"]
    with opened(guarded, request(b"{}", KEY + offer, 100)) as client:
        read_all(client)  # closed once the body should have arrived


@pytest.mark.parametrize("path", ["/health", "/v1/audio/speech/stream", "/nowhere"])
def test_a_get_request_with_an_offer_is_answered_like_one_without(guarded: str, path: str) -> None:
    line = f"GET {path}"
    with opened(guarded, request(headers=KEY, line=line)) as client:
        expected = answers(client)
    with opened(guarded, request(headers=KEY + H2C, line=line)) as client:
        assert answers(client) == expected
    if not path.endswith("/stream"):
        with opened(guarded, request(headers=KEY + WEBSOCKET, line=line)) as client:
            assert answers(client) == expected


@pytest.mark.parametrize("data", [b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
def test_other_protocols_are_refused_at_once(guarded: str, data: bytes) -> None:
    with opened(guarded, data) as client:
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
def test_a_message_that_does_not_end_in_time_closes_its_websocket(guarded: str, data: bytes) -> None:
    with socket_of(guarded) as client:
        client.sendall(data)
        assert closed_with(client) == 1008


def test_pings_are_no_unfinished_message(guarded: str) -> None:
    with socket_of(guarded) as client:
        for _ in range(8):
            client.settimeout(60)
            client.sendall(frame(9, b"x"))
            assert client.recv(3) == b"\x8a\x01x"
            client.settimeout(SECONDS / 2)
            with pytest.raises(TimeoutError):
                client.recv(1)


def test_of_two_clients_one_with_many_frames_takes_no_more_of_the_loop_than_the_other(guarded, monkeypatch) -> None:
    """All frames have arrived before the loop reads the first of them."""
    handled: list[LimitedSocket] = []
    handle = LimitedSocket.handle_ping
    monkeypatch.setattr(LimitedSocket, "handle_ping", lambda socket: (handled.append(socket), handle(socket))[1])
    with socket_of(guarded) as greedy, socket_of(guarded) as modest:
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


def test_what_is_sent_to_a_client_that_was_refused_meanwhile_is_no_error_of_ours() -> None:
    async def send(kind: str) -> None:
        refused = object.__new__(LimitedSocket)
        refused.writable, refused.handshake_complete, refused.initial_response = asyncio.Event(), True, None
        refused.close_sent, refused.disconnected = True, False
        refused.writable.set()
        await refused.send({"type": kind})

    asyncio.run(send("websocket.close"))
    with pytest.raises(OSError):  # as of a connection that is gone
        asyncio.run(send("websocket.send"))


@pytest.fixture(scope="module")
def small() -> Iterator[str]:
    """A service whose budget is one body of 3.3 MiB, for which it waits."""
    with stubbed(max_streams=4, max_reference_mb=1) as served:
        yield served


def answered(*clients: socket.socket) -> socket.socket:
    """The first one to which the server sends something."""
    return select.select(clients, [], [], 60)[0][0]


def test_unfinished_messages_share_a_budget(small: str) -> None:
    """Texts are served in the meantime."""
    half = 2 << 20
    with socket_of(small) as first, socket_of(small) as second:
        first.sendall(frame(1, b" " * half, length=half + 1))
        with contextlib.suppress(ConnectionError):  # it may be closed before all is sent
            second.sendall(frame(1, b" " * half, length=half + 1))
        assert closed_with(answered(first, second)) in (1013, 0)
        spoken = httpx.post(f"{small}{SPEECH}", json=TEXT)
        assert spoken.status_code == 200
    with socket_of(small) as client:  # what the others held is given back
        client.sendall(frame(1, b" " * half))
        assert b"characters besides letters" in client.recv(1 << 16)


def test_an_answer_holds_no_memory_of_its_request(small: str) -> None:
    """Three such requests are more than the budget."""
    body = json.dumps({**TEXT, "input": "endless", "ref_audio": in_base64(recording(20.0))}).encode()
    with contextlib.ExitStack() as clients:
        for _ in range(3):
            client = clients.enter_context(opened(small, request(body)))
            assert client.recv(15) == b"HTTP/1.1 200 OK"


def test_unfinished_bodies_share_a_budget_which_is_given_back(small: str) -> None:
    half = 2 << 20
    wanted = request(b" " * half, KEY)
    with opened(small, wanted[:-1]) as first, opened(small, wanted[:-1]) as second:
        assert answers(answered(first, second)) == [b"HTTP/1.1 503 Service Unavailable"]
        spoken = httpx.post(f"{small}{SPEECH}", json=TEXT)
        assert spoken.status_code == 200
    until(lambda: httpx.post(f"{small}{SPEECH}", content=b" " * half).status_code == 400)


@pytest.mark.parametrize(
    "header",
    [*(b"Sec-WebSocket-Protocol: " + each for each in (b"a," * 10_000, b"\xff", b"a, \xe9"))]
    + [b"Transfer-Encoding: chunked", b"Content-Length: 5"],
    ids=["long", "byte", "letter", "chunked", "body"],
)
def test_a_handshake_that_cannot_be_read_is_answered(guarded, header, caplog) -> None:
    data = request(headers=KEY + WEBSOCKET, line=f"GET {SPEECH}/stream")
    with opened(guarded, data.replace(b"Content-Length: 0", header)) as client:
        assert [line[:10] for line in answers(client)] == [b"HTTP/1.1 4"]
    assert not [record for record in caplog.records if record.exc_info]


def test_a_message_that_is_no_utf8_closes_its_websocket_and_is_not_logged_as_our_error(guarded, caplog) -> None:
    with socket_of(guarded) as client:
        client.sendall(frame(1, b'{"type": "input.text", "text": "\xed\xa0\x80"}'))
        assert closed_with(client) == 1007
    assert not [record for record in caplog.records if record.exc_info]


def test_requests_that_wait_for_answers_that_nobody_reads_are_few(guarded: str) -> None:
    wanted = request(headers=KEY, line="GET /health")
    with opened(guarded, wanted * 50) as client:
        assert answers(client) == [b"HTTP/1.1 200 OK"] * 50
    with opened(guarded, wanted * 3000) as client:
        assert len(answers(client)) < 1000


def test_pings_of_a_client_that_does_not_read_are_not_collected(guarded: str) -> None:
    with socket_of(guarded, receive_buffer=4096) as client:
        memory, pings = psutil.Process().memory_info, frame(9, bytes(125)) * 1000
        before = memory().rss
        with contextlib.suppress(ConnectionError):  # so many end the connection
            for _ in range(400):  # 52 MB
                client.sendall(pings)
        assert memory().rss - before < 25 << 20
