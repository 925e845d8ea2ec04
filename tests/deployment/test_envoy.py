"""deploy/envoy/envoy.yaml, run by Envoy in front of servers that the tests play."""

import re
import signal
import socket
import socketserver
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
import httpx2 as httpx
import pytest
from cosyvoice_triton.api import Client, ClientError
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.conftest import ROOT
from tests.support import http_servers
from tests.support.gateway import Gateway, Ports, gateway, wait_for
from tests.support.http_servers import Page, PageServer, http_server
from tests.support.queries import unknown
from tests.support.speech_fixtures import stub_triton
from tests.support.triton_stub import TritonStub, stub_process

MODEL = TritonStub.model
NONE_READY = "no speech server is ready|ended the call"  # grpc.aio may lose the text


class Pages(PageServer):
    """Triton's HTTP, its health page and a speech service in one.

    `status` is its health. Other pages repeat the request; /slow does so when `released` is set.
    """

    def __init__(self, *args: Any) -> None:
        self.status, self.paths = 200, set[str]()
        self.asked, self.released = threading.Event(), threading.Event()
        super().__init__(*args)


class Handler(Page):
    server: Pages
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        if self.path in ("/ready", "/health"):
            own = self.path == "/ready" or self.headers["Host"] == "127.0.0.1"  # the speech service may refuse names
            return self.reply(self.server.status if own else 403, {})
        self.server.asked.set()
        self.server.paths.add(self.path)
        if self.path.startswith("/slow"):
            self.server.released.wait(60)
        if self.headers.get("Upgrade") == "websocket":
            self.send_response(101)  # without a length
            self.send_header("Upgrade", "websocket")
            self.send_header("Connection", "Upgrade")
            self.end_headers()
            self.wfile.write(self.rfile.readline())
            return None
        headers = {name.lower(): value for name, value in self.headers.items()}
        return self.reply(200, {"path": self.path, "body": self.body().decode(), "headers": headers})


@dataclass
class Servers:
    """Two Tritons, each a stub of gRPC and the pages beside it."""

    stubs: list[TritonStub] = field(default_factory=lambda: [TritonStub(pause=0.05) for _ in range(2)])
    pages: list[Pages] = field(default_factory=list)
    ports: list[Ports] = field(default_factory=list)

    def served(self) -> list[int]:
        return [stub.served for stub in self.stubs]

    def since(self, before: list[int]) -> list[int]:
        return [now - then for now, then in zip(self.served(), before, strict=True)]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers()
    with ExitStack() as stack:
        for stub in servers.stubs:
            page = cast(Pages, stack.enter_context(http_server(Handler, kind=Pages)))
            address = stack.enter_context(stub_triton(stub))
            servers.pages.append(page)
            servers.ports.append(Ports(page.server_port, int(address.rpartition(":")[2]), page.server_port))
        yield servers


@contextmanager
def running(directory: Path, servers: Servers, **options: Any) -> Iterator[Gateway]:
    with gateway(directory, servers.ports, [page.server_port for page in servers.pages], **options) as started:
        wait_for(lambda: started.servers() == started.servers("tts_http") == started.servers("speech") == 2)
        wait_for(lambda: speaks(started))  # Envoy's threads learn it a moment later
        yield started


@pytest.fixture(scope="module")
def open_gateway(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running(tmp_path_factory.mktemp("envoy"), servers) as started:
        yield started


def ask(port: int, path: str, body: bytes | None = None, method: str | None = None, **headers: str) -> tuple[int, Any]:
    """Status and content of an answer; its headers if the content is not JSON."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    verb, url = method or ("GET" if body is None else "POST"), f"http://127.0.0.1:{port}{path}"
    answer = httpx.request(verb, url, content=body, headers=names, timeout=60)
    try:
        return answer.status_code, answer.json() | {"retry-after": answer.headers.get("Retry-After")}
    except ValueError:
        return answer.status_code, answer.headers


def raw(port: int, request: str, source: str = "127.0.0.1") -> str:
    """What comes back for the bytes of a request, until the connection is closed or the first line has come."""
    with socket.create_connection(("127.0.0.1", port), 60, (source, 0)) as connection:
        connection.sendall(request.encode())
        return connection.recv(1 << 16).decode()


def speak(running: Gateway, text: str = "quick words", **options: Any) -> int:
    with Client(f"127.0.0.1:{running.grpc}", MODEL) as client:
        return client.speak(text, **options).size


def speaks(running: Gateway) -> bool:
    try:
        return speak(running) > 0
    except ClientError:
        return False


def test_triton_gets_queries_about_public_models_and_nothing_to_parse(open_gateway: Gateway, servers: Servers) -> None:
    port = open_gateway.http
    for path in ("", "/health/live", "/health/ready", f"/models/{MODEL}/ready", f"/models/{MODEL}/config"):
        path = f"/v2{path}"
        status, asked = ask(port, path, content_encoding="gzip", accept_encoding="gzip")
        assert (status, asked["path"], asked["body"]) == (200, path, "")
        assert not {"content-encoding", "accept-encoding"} & set(asked["headers"])
    assert ask(port, "/v2/health/ready", method="HEAD")[0] == 200
    closed = ["/v2/repository/index", "/v2/systemsharedmemory/status", "/v2/models/token2wav_dit/ready", "/v2/logging"]
    closed += ["/metrics", "//v2/health/ready"]
    for path in (*closed, f"/v2/models/{MODEL}/generate", f"/v2/models/{MODEL}/../token2wav/ready"):
        assert ask(port, path)[0] == 404, path
    assert ask(port, f"/v2/models/{MODEL}/config", b"{}", "GET")[0] == 413
    assert ask(port, f"/v2/models/{MODEL}/config", b"1")[0] == 404
    chunked = "GET /v2/health/ready HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[[\r\n0\r\n\r\n"
    assert raw(port, chunked).startswith("HTTP/1.1 413")
    status, asked = ask(port, f"/v2/models/{MODEL}/infer", b"{}")  # of the speech service
    assert (status, asked["body"]) == (200, "{}")
    assert ask(port, f"/v2/models/{MODEL}/infer")[0] == 404


def test_grpc_offers_speech_and_no_management_and_drops_the_header_that_crashes(open_gateway, servers) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{open_gateway.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(service_pb2.ServerLiveRequest()).live
        assert stub.ModelReady(service_pb2.ModelReadyRequest(name=MODEL)).ready
        assert stub.ModelConfig(service_pb2.ModelConfigRequest(name=MODEL)).config.name == MODEL
        for name in ("RepositoryIndex", "SystemSharedMemoryStatus"):
            with pytest.raises(grpc.RpcError, match="not offered here") as refused:
                getattr(stub, name)(getattr(service_pb2, f"{name}Request")())
            assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
        request = service_pb2.ModelInferRequest(model_name=MODEL)
        request.inputs.add(name="target_text", datatype="BYTES", shape=[1, 1])
        request.raw_input_contents.append(b"\x05\0\0\0quick")
        before = servers.served()
        headers = (("triton_grpc_error", "true"), ("x-voice-key", "anna"))
        assert len(list(stub.ModelStreamInfer(iter([request]), metadata=headers))) == 3
    chosen = servers.stubs[servers.since(before).index(1)]
    assert chosen.headers["x-voice-key"] == "anna" and "triton_grpc_error" not in chosen.headers


def test_the_page_of_metrics_is_all_that_its_port_offers(open_gateway: Gateway) -> None:
    assert unknown(httpx.get(f"http://127.0.0.1:{open_gateway.metrics}/stats/prometheus").text, "envoy_") == set()
    for method, path in (("POST", "/quitquitquit"), ("POST", "/stats/prometheus"), ("GET", "/config_dump")):
        assert ask(open_gateway.metrics, path, method=method)[0] == 404


@pytest.mark.parametrize("route", ["/v1/audio/speech/stream", "/v1/realtime"])
def test_only_routes_of_websockets_are_upgraded(open_gateway: Gateway, route: str) -> None:
    offer = "GET {} HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nhello\r\n"
    with socket.create_connection(("127.0.0.1", open_gateway.speech), 60) as connection:
        connection.sendall(offer.format(route).encode())
        received = b""
        while b"hello" not in received:
            assert (part := connection.recv(1 << 16)), received
            received += part
    assert received.startswith(b"HTTP/1.1 101")
    for port, path in ((open_gateway.speech, "/v1/voices"), (open_gateway.http, "/v2/health/ready")):
        assert raw(port, offer.format(path)).startswith("HTTP/1.1 403")


def test_the_speech_service_gets_the_callers_address_and_no_endless_header(open_gateway: Gateway) -> None:
    _, asked = ask(open_gateway.speech, "/v1/voices", x_forwarded_for="1.2.3.4", x_envoy_retry_on="5xx")
    assert "traceparent" not in asked["headers"]  # with which the speech service would sample nothing
    claimed, seen = asked["headers"]["x-forwarded-for"].split(",")
    assert claimed == "1.2.3.4" != seen and "x-envoy-retry-on" not in asked["headers"]
    assert ask(open_gateway.speech, "/", x_long="a" * 40_000)[0] == 431


class Closing(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(1 << 16)


def test_a_request_that_was_not_answered_goes_to_two_other_servers(servers: Servers, tmp_path: Path) -> None:
    """Two of the three close every connection as soon as a request has come; they say that they are ready."""
    with ExitStack() as stack:
        broken = []
        for _ in range(2):
            closing = stack.enter_context(http_servers.running(socketserver.TCPServer(("127.0.0.1", 0), Closing)))
            broken.append(servers.ports[0]._replace(grpc=closing.server_address[1]))
        started = stack.enter_context(gateway(tmp_path, [*broken, servers.ports[1]]))
        wait_for(lambda: started.servers() == 3)
        wait_for(lambda: speak(started) > 0 and any(line["tries"] == 3 for line in started.accesses()))


def test_if_a_server_dies_only_streams_that_had_begun_there_fail(servers: Servers, tmp_path: Path) -> None:
    """Its page still says that it is ready, so that later streams may be sent there first."""

    def goes_on(stream: Iterator[Any]) -> bool:
        try:
            return all(next(stream).size for _ in range(20))
        except ClientError:
            return False

    with stub_process(chunks=1000, pause=0.05) as dying:
        ports = [servers.ports[0]._replace(grpc=int(dying.address.rpartition(":")[2])), servers.ports[1]]
        with gateway(tmp_path, ports) as started, Client(f"127.0.0.1:{started.grpc}", MODEL) as client:
            wait_for(lambda: started.servers() == 2)
            streams = [client.stream("endless words", voice=f"voice {number}") for number in range(8)]
            assert all(next(stream).size for stream in streams)
            staying = servers.stubs[1].live
            dying.process.kill()
            assert 0 < sum(map(goes_on, streams)) == staying < len(streams)
            for _ in range(4):
                assert speak(started) > 0


def test_servers_that_are_not_ready_get_nothing(servers: Servers, tmp_path: Path) -> None:
    with running(tmp_path, servers) as started:
        try:
            servers.pages[0].status = 503
            wait_for(lambda: started.servers() == 1)
            before = servers.served()
            for _ in range(8):
                speak(started)
            assert servers.since(before) == [0, 8]
            servers.pages[1].status = 503
            path = f"/v2/models/{MODEL}/ready"
            wait_for(lambda: ask(started.http, path)[0] == ask(started.speech, "/")[0] == 503)
            wait_for(lambda: started.servers() == 0)
            with pytest.raises(ClientError, match=NONE_READY):
                speak(started)
            assert ask(started.http, path) == (503, {"error": "no speech server is ready", "retry-after": "2"})
            status, refused = ask(started.speech, "/v1/audio/speech", b"{}")
            assert (status, refused["error"]["type"], refused["retry-after"]) == (503, "server_error", "2")
        finally:
            for page in servers.pages:
                page.status = 200
        wait_for(lambda: speaks(started))


def test_a_stopped_gateway_ends_when_its_last_stream_has_and_accepts_nothing_new(servers, tmp_path) -> None:
    page = servers.pages[0]
    page.asked.clear(), page.released.clear()
    with ThreadPoolExecutor() as threads, gateway(tmp_path, servers.ports[:1], [page.server_port]) as started:
        wait_for(lambda: started.servers() == started.servers("speech") == 1)
        speaking = threads.submit(speak, started, "slow words")
        waiting = threads.submit(ask, started.speech, "/slow")
        assert page.asked.wait(60)
        started.process.send_signal(signal.SIGTERM)

        def closed() -> bool:
            with socket.socket() as connection:
                return connection.connect_ex(("127.0.0.1", started.speech)) != 0

        wait_for(closed)
        time.sleep(1)  # in which it would end if it did not wait
        assert started.process.poll() is None
        page.released.set()
        assert waiting.result()[0] == 200 and speaking.result() > 0
    assert not any("disconnect" in line["flags"] for line in started.accesses())


def test_a_voice_stays_with_a_server_until_it_is_hot(open_gateway: Gateway, servers: Servers) -> None:
    homes = []
    for voice in ("anna", "ben", "carl", "dora", "emil", "fay", "gus", "hal"):
        before = servers.served()
        for _ in range(3):
            speak(open_gateway, voice=voice)
        homes.append(servers.since(before))
    assert {tuple(sorted(home)) for home in homes} == {(0, 3)} and len({tuple(home) for home in homes}) == 2
    before = servers.served()
    with Client(f"127.0.0.1:{open_gateway.grpc}", MODEL) as client, ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda _: client.speak("words", voice="anna"), range(16)))
    assert min(servers.since(before)) >= 4


def test_the_access_log_has_id_voice_and_time_to_the_first_byte(open_gateway: Gateway) -> None:
    speak(open_gateway, voice="somebody")
    ask(open_gateway.speech, "/logged", x_request_id="mine")
    assert ask(open_gateway.http, "/gateway/health")[0] == 200

    def found(**fields: Any) -> list[dict[str, Any]]:
        return [line for line in open_gateway.accesses() if fields.items() <= line.items()]

    wait_for(lambda: bool(found(voice="somebody") and found(request_id="mine", request="GET /logged")))
    (line,) = found(voice="somebody")
    assert line["grpc_status"] == "OK" and line["ms"] >= line["first_byte_ms"] >= 0 and line["request_id"]
    assert not found(request="GET /gateway/health")


def test_each_key_and_address_has_a_rate_and_all_servers_a_number_of_streams(servers: Servers, tmp_path: Path) -> None:
    def edit(text: str) -> str:
        bucket = "{max_tokens: %d, tokens_per_fill: 1, fill_interval: 3600s}"
        for old, new in (
            ("numerator: 0}", "numerator: 100}"),
            ("&bucket {max_tokens: 100, tokens_per_fill: 10, fill_interval: 1s}", bucket % 12),  # of an address
            ("*bucket", bucket % 3),  # of a key
            ("max_requests: 4096", "max_requests: 2"),
        ):
            assert text.count(old) == 1
            text = text.replace(old, new)
        return text

    with running(tmp_path, servers, edit=edit) as started:
        statuses = {
            key: [ask(started.speech, "/v1/voices", authorization=f"Bearer {key}")[0] for _ in range(5)]
            for key in ("one", "two")
        }
        assert statuses == dict.fromkeys(("one", "two"), [200] * 3 + [429] * 2)
        request = "GET /v1/voices HTTP/1.1\r\nHost: a\r\n\r\n"
        answers = [raw(started.speech, request, "127.0.0.2").split()[1] for _ in range(14)]
        assert answers == ["200"] * 12 + ["429"] * 2
        with Client(f"127.0.0.1:{started.grpc}", MODEL) as client:
            live = [client.stream("endless words") for _ in range(2)]
            assert all(next(stream).size for stream in live)
            with pytest.raises(ClientError, match=NONE_READY):
                speak(started)
            del live  # which cancels them
            wait_for(lambda: not any(stub.live for stub in servers.stubs))
        wait_for(lambda: speaks(started))


def block(document: str, word: str, indent: int) -> str:
    """The part of a configuration with this word that a document shows."""
    (found,) = (one for one in re.findall(r"```\n(.*?)```", (ROOT / document).read_text(), re.DOTALL) if word in one)
    return textwrap.indent(found, " " * indent)


def test_the_keys_of_the_documents_are_asked_for(servers: Servers, tmp_path: Path) -> None:
    def add(text: str) -> str:
        first, last = text.split("                  - &router\n")
        return first + block("SECURITY.md", "api_key_auth", 18) + "                  - &router\n" + last

    with (
        gateway(tmp_path, servers.ports, edit=add) as started,
        grpc.insecure_channel(f"127.0.0.1:{started.grpc}") as to,
    ):
        wait_for(lambda: started.servers() == 2)
        stub, request = service_pb2_grpc.GRPCInferenceServiceStub(to), service_pb2.ModelReadyRequest(name=MODEL)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelReady(request)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert stub.ModelReady(request, metadata=[("authorization", "Bearer a-long-random-key")]).ready


def test_the_traces_of_the_documents_reach_a_collector(servers: Servers, tmp_path: Path) -> None:
    page = servers.pages[0]

    def add(text: str) -> str:
        text = text.replace("  clusters:\n", "  clusters:\n" + block("docs/deploy.md", "name: traces", 4))
        place = "                stat_prefix: speech\n"
        text = text.replace(place, place + block("docs/deploy.md", "http_uri", 16))
        return text.replace(
            "address: COLLECTOR, port_value: 4318", f"address: 127.0.0.1, port_value: {page.server_port}"
        )

    with gateway(tmp_path, [], [page.server_port], edit=add) as started:
        wait_for(lambda: started.servers("speech") == 1)
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        sent = ask(started.speech, "/v1/voices", traceparent=parent)[1]["headers"]["traceparent"].split("-")
        assert sent[1] == parent.split("-")[1] and sent[3] == "01"
        wait_for(lambda: "/v1/traces" in page.paths)
