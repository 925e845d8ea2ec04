"""What a machine can do to a healthy server: full disks, odd processes, proxies, signals, addresses."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest
from cosyvoice_triton.cli import serve
from cosyvoice_triton.client.failures import ClientError
from cosyvoice_triton.client.grpc_client import AsyncConnection
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.errors import FatalError, UnavailableError
from cosyvoice_triton.monitoring.environment import GRPC_ADDRESS, METRICS_DIRECTORY
from cosyvoice_triton.monitoring.health import ModelMonitor, Notice, failure_of, report_failure
from cosyvoice_triton.monitoring.metrics import LIVE, page, sum_of
from cosyvoice_triton.server import readiness
from cosyvoice_triton.server.installation import compile_library
from cosyvoice_triton.server.tritonserver import Ports, ServerError, TritonServer, free_port, require_free
from cosyvoice_triton.server.watch import HUNG_SECONDS, WATCH_SECONDS, ModelWatch
from cosyvoice_triton.triton_io.streams import Streams

from tests.support.http_servers import Page, http_server
from tests.support.serve_process import children, serve_process, with_model
from tests.support.waiting import until

ARGS = {"model_name": "m", "model_instance_name": "m_0"}
FREE_PORTS = [f"--{name}-port=0" for name in ("http", "grpc", "metrics", "health")]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB with 64 inodes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=64", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root mounts file systems")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Take all bytes and all inodes."""
    with pytest.raises(OSError, match="No space left"), (disk / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(4096))
    with pytest.raises(OSError, match="No space left"):
        for number in range(100):
            (disk / f"{number}").touch()


def test_a_full_disk_stops_no_sign_of_life_no_number_no_drain_and_no_report_of_a_failure(disk, monkeypatch, caplog):
    monkeypatch.setenv(METRICS_DIRECTORY, str(disk))
    monkeypatch.setattr("cosyvoice_triton.monitoring.health.PERIOD_SECONDS", 0.02)
    drain, live = Notice(disk / "draining"), 1
    drain.reserve()
    read = Mock(side_effect=lambda: {LIVE: live})
    monitor = ModelMonitor(ARGS, test=dict, read=read)
    try:
        watch = ModelWatch(disk)
        fill(disk)
        live = 10**6
        for _ in range(int(HUNG_SECONDS / WATCH_SECONDS) + 1):
            before = read.call_count + 1  # of which all is written when it reads again
            until(lambda before=before: read.call_count > before)
            assert watch.check() == {} and watch.why_not_ready() == ""
        assert sum_of(page(disk), LIVE.name) == live
        drain.give()
        assert Notice(disk / "draining").given()
        assert not caplog.records
        report_failure("m", FatalError("the engine is dead"))
        assert watch.check() == {"m": "model m has failed and cannot recover: the engine is dead"}
        assert failure_of(disk, "m").given()
    finally:
        monitor.close()


def test_numbers_that_cannot_be_written_are_logged_once(published, caplog) -> None:
    read = Mock(side_effect=chain([{}], repeat(OSError("the disk is gone"))))
    monitor = ModelMonitor(ARGS, test=dict, read=read)
    until(lambda: read.call_count > 3)
    monitor.close()
    assert [record.message for record in caplog.records] == ["cannot write the metrics"]


def test_a_process_whose_name_is_not_utf8_disturbs_nobody(tmp_path: Path) -> None:
    """The kernel keeps 15 bytes of a name, and cuts within a character."""
    code = (
        "import ctypes; ctypes.CDLL(None).prctl(15, b'worker-\\xc3\\xa4\\xe2\\x82) \\xff'); print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as odd:
        assert odd.stdout is not None and odd.stdout.readline()
        server = TritonServer(tmp_path, ports=Ports(0, 0, 0))
        server._process = odd
        assert server.model_processes() == {} and readiness.is_alive(odd.pid)
        server._process = None
        server.stop()


DEAD = "http://127.0.0.1:9"  # nothing listens there


@pytest.fixture(params=["no_proxy is unset", "no_proxy names another host"])
def dead_proxy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    # urlopen keeps the proxies of its first call for the whole process: later tests must not get these.
    monkeypatch.setattr(urllib.request, "_opener", None)
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, DEAD)
        monkeypatch.setenv(name.upper(), DEAD)
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
        if "another" in request.param:
            monkeypatch.setenv(name, "example.com")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1.2.3", "[::1]"])
def test_pages_of_this_machine_are_read_without_a_proxy_and_others_through_it(host: str, dead_proxy: None) -> None:
    with http_server(Page, "127.0.0.1" if host == "localhost" else host.strip("[]")) as server:
        assert readiness.fault(f"http://{host}:{server.server_port}/") is None
    assert "refused" in str(readiness.fault("http://192.0.2.1/"))  # by the proxy; that address answers nobody


@pytest.mark.parametrize("connect", [AsyncConnection, Streams], ids=lambda connect: connect.__name__)
def test_grpc_to_this_machine_goes_through_no_proxy(connect, dead_proxy, monkeypatch) -> None:
    """Each of our clients, with a server that does not know the method: UNIMPLEMENTED comes from there."""
    server = grpc.server(ThreadPoolExecutor(1))
    address = f"localhost:{server.add_insecure_port('localhost:0')}"
    server.start()
    monkeypatch.setenv(GRPC_ADDRESS, address)

    async def ask() -> None:
        if connect is Streams:
            async for _ in Streams("m", ["y"]).ask({}, {}):
                pass
            return
        connection = AsyncConnection(address)
        try:
            async for _ in connection.stream("m", Utterance("a"), "streaming", 10.0):
                pass
        finally:
            await connection.aclose()

    try:
        with pytest.raises(
            (ClientError, UnavailableError), match="UNIMPLEMENTED|[Mm]ethod not found|server has ended the call"
        ):
            asyncio.run(asyncio.wait_for(ask(), 30))
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
def test_a_port_in_use_and_a_foreign_address_are_told_apart(host: str) -> None:
    with http_server(Page, host) as server, pytest.raises(ServerError, match=f"port {server.server_port} is in use"):
        require_free(server.server_port, host)
    require_free(free_port(), host)
    for foreign in ("192.0.2.1", "2001:db8::1"):
        with pytest.raises(ServerError, match=r"cannot listen on .*: Cannot assign.*; a host must be an address of"):
            require_free(free_port(), foreign)
    with pytest.raises(ServerError, match="65536 is no port"):
        require_free(65536, "127.0.0.1")


def test_a_folder_for_the_log_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert serve.main([str(tmp_path), "--log-file", str(tmp_path), *FREE_PORTS]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    error = capsys.readouterr().err
    assert error == f"the log file {tmp_path} is a folder; name a file: {tmp_path}/server.log\n"


@pytest.mark.server
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_two_signals_a_second_apart_leave_nothing_behind(second: signal.Signals, tmp_path: Path) -> None:
    """The model is still loading then. What the server says goes to a full disk, which does not stop it."""
    repository = with_model(tmp_path / "repository", code="import time\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "cosyvoice_triton", "serve", repository, f"--log-file={tmp_path}/log", *FREE_PORTS]
    with Path("/dev/full").open("wb") as full, subprocess.Popen(command, stdout=full, stderr=full) as process:
        until(lambda: len(descendants(process.pid)) >= 3, every=0.1)  # tritonserver, the sweeper, the stub
        children = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
        process.send_signal(second)
        assert process.wait(60) in (0, -second)  # the second one may reach an interpreter that is ending
    until(lambda: not any(map(readiness.is_alive, children)))


@pytest.mark.server
def test_a_server_on_an_ipv6_address_answers_at_the_urls_that_it_prints(tmp_path: Path) -> None:
    options = ["--host=::1", "--http-host=::1", "--grpc-host=::1", "--speech-port", str(free_port())]
    repository = with_model(tmp_path / "my repository")
    with serve_process(repository, tmp_path / "log", *options, "--voices", str(tmp_path / "voices")) as server:
        found = {name: url for name, url in re.findall(r"(http|grpc|metrics|health|page) (\S+)", server.printed)}
        assert len(found) == 5 and all("[::1]:" in url for url in found.values()), server.printed
        for name, page in (("http", "/v2/health/ready"), ("metrics", ""), ("health", "")):
            assert readiness.fault(f"http://{found[name]}{page}") is None
        assert "HTTP 503" in str(readiness.fault(f"{found['page']}health"))  # it serves; no speech model does
        with grpc.insecure_channel(found["grpc"]) as channel:
            grpc.channel_ready_future(channel).result(60)
        server.terminate()
        assert server.process.wait(60) == 0


def test_a_second_signal_ends_the_speech_service_that_is_being_stopped() -> None:
    code = """
from pathlib import Path
from cosyvoice_triton.server import serving
from cosyvoice_triton.server.tritonserver import free_port
from cosyvoice_triton.speech_service.sidecar import speech_service
serving.raise_on_sigterm()
try:
    with speech_service("localhost:9", Path("/nowhere"), "127.0.0.1", free_port()) as ended:
        print(flush=True)
        ended.wait()
except (serving.Terminated, KeyboardInterrupt):
    pass
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        children = descendants(process.pid)
        assert len(children) == 2  # the service and what ends it after a kill -9 of this process
        for child in children:
            os.kill(child, signal.SIGSTOP)  # so that stopping it takes longer
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
        os.kill(children[1], signal.SIGCONT)
        assert process.wait(60) == 0
    try:
        assert not [child for child in children if readiness.is_alive(child)]
    finally:
        for child in filter(readiness.is_alive, children):
            os.kill(child, signal.SIGKILL)


def descendants(process: int) -> list[int]:
    return [each for child in children(process) for each in (child, *descendants(child))]


def test_without_a_compiler_the_server_warns_what_a_stranger_can_do(tmp_path, monkeypatch, caplog) -> None:
    library = compile_library(tmp_path)
    assert library is not None and library.stat().st_size and not caplog.text
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compile_library(tmp_path) is None
    assert "whoever reaches the gRPC port can end the server" in caplog.text and "apt-get install gcc" in caplog.text
