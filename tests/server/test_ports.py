"""What belongs to a server. Its ports: which are chosen, what a probe says until they answer, what other machines
reach. Its log: kept over restarts and bounded. Its response cache: where it is, and that nothing of a deleted voice
stays in a Redis."""

import os
import socket
import socketserver
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cosyvoice_triton.cli import serve
from cosyvoice_triton.cli import voice as command
from cosyvoice_triton.server import logs
from cosyvoice_triton.server.logs import KEPT, LogRotation, failure
from cosyvoice_triton.server.readiness import fault
from cosyvoice_triton.server.response_cache import cache_option
from cosyvoice_triton.server.tritonserver import Ports, TritonServer, free_port, usable_ports

from tests.support.http_servers import echo_server, running


def test_no_port_is_one_that_the_kernel_gives_to_clients(tmp_path: Path) -> None:
    ephemeral = tmp_path / "ip_local_port_range"
    ephemeral.write_text("30000\t65000\n")
    ports = usable_ports(ephemeral)
    assert sorted(ports) == [*range(20_000, 30_000), *range(65_001, 65_536)]
    assert ports[0] != usable_ports(ephemeral)[0] or ports[0] != usable_ports(ephemeral)[0]  # not all from one start
    ephemeral.write_text("1024\t65535\n")  # nothing is outside
    assert len(usable_ports(ephemeral)) == 65_536 - 20_000
    assert not {32768, 60999} & set(usable_ports(tmp_path / "missing"))


def test_free_ports_are_free_and_differ() -> None:
    first = free_port()
    with socket.socket() as taken:
        with suppress(OSError):  # somebody else's already
            taken.bind(("127.0.0.1", first + 1))
        more = [free_port() for _ in range(20)]
    assert len({first, first + 1, *more}) == 22 and {first, *more} <= set(usable_ports())


def test_a_port_that_answers_with_something_else_than_http_is_not_ready(tmp_path: Path) -> None:
    with echo_server() as port:
        assert fault(f"http://127.0.0.1:{port}/ready") == "GET /ready HTTP/1.1"
        server = TritonServer(tmp_path, ports=Ports(http=port, grpc=port, metrics=port))
        try:
            assert not server.answers_ready()
        finally:
            server.stop()


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (["--grpc-host", "0.0.0.0"], "triton_grpc_error: offer it through the gateway only"),
        (["--host", "0.0.0.0"], "accept connections of this machine only"),
    ],
)
def test_serve_says_what_other_machines_can_reach(options, warning, tmp_path, caplog) -> None:
    assert serve.main([str(tmp_path / "no repository"), *options]) == 1
    assert warning in caplog.text


def test_the_log_of_an_earlier_server_is_kept_and_the_oldest_one_goes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    rotation = LogRotation(log)
    rotation.rotate()
    with log.open("ab", buffering=0) as written:
        for run in range(KEPT + 2):
            written.write(b"crash %d" % run)
            rotation.rotate()
            assert log.stat().st_size == 0  # the open file goes on at its beginning
    kept = [log.with_name(f"log.{number}").read_text() for number in range(1, KEPT + 1)]
    assert kept == [f"crash {run}" for run in range(KEPT + 1, 1, -1)]
    assert len(list(tmp_path.iterdir())) == KEPT + 1
    log.write_text("abc")
    rotation.rotate(above=3)
    assert log.read_text() == "abc"
    rotation.rotate(above=2)
    assert log.read_text() == "" and log.with_name("log.1").read_text() == "abc"


def test_after_a_failed_copy_the_next_is_tried_when_the_log_has_grown_by_its_limit(tmp_path, monkeypatch, caplog):
    """As on a full disk: nothing is lost, and the earlier log stays."""
    log, earlier, attempts = tmp_path / "log", tmp_path / "log.1", list[int]()
    earlier.write_text("earlier")

    def full(log: Path, copy: Path) -> None:
        attempts.append(log.stat().st_size)
        copy.write_bytes(b"a part")
        raise OSError("No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    monkeypatch.setattr(logs, "MAX_BYTES", 100)
    rotation = LogRotation(log)
    for size in (150, 151, 249, 250, 251):
        log.touch()
        os.truncate(log, size)
        rotation.rotate(above=100)
    assert attempts == [150, 250]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert log.stat().st_size == 251 and earlier.read_text() == "earlier"
    assert sorted(tmp_path.iterdir()) == [log, earlier]


def test_of_a_failed_start_the_last_line_is_why_a_model_was_not_loaded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        'E1129 09:26:47.586767 1 server.cc:241] "CudaDriverHelper has not been initialized."\n'
        'I1129 09:26:48.000000 1 server.cc:1] "loading"\n'
        'E1129 09:27:37.240651 1 backend_model.cc:692] "ERROR: Failed to create: ValueError: no\\n\\nAt:\\n  a.py"\n'
        "E1129 09:27:37.240785 1 model_lifecycle.cc:642] \"failed to load 'a' version 1: Internal: ValueError: no\"\n"
        "| a     | 1       | UNAVAILABLE: Internal: ValueError: no |\n"
        "error: creating server: Internal - failed to load all models\n"
    )
    shown = failure(log).splitlines()
    assert len(shown) == 5 and shown[2] == "At:" and shown[-1] == "a: ValueError: no"
    log.write_text("terminate called\n  what():  std::bad_alloc\n")
    assert failure(log) == "  what():  std::bad_alloc"


class Redis(socketserver.ThreadingTCPServer):
    """A Redis with a password and one entry."""

    def __init__(self) -> None:
        self.entries = {"hash of a recording": b"speech tokens"}
        super().__init__(("127.0.0.1", 0), socketserver.StreamRequestHandler)

    def finish_request(self, request, client_address) -> None:
        known = False
        with request.makefile("rwb", 0) as connection:
            while count := connection.readline().strip().removeprefix(b"*"):
                words = [connection.read(int(connection.readline()[1:]) + 2)[:-2] for _ in range(int(count))]
                known = known or words == [b"AUTH", b"secret"]
                if known and words == [b"FLUSHDB"]:
                    self.entries.clear()
                connection.write(b"+OK\r\n" if known else b"-NOAUTH Authentication required.\r\n")


@pytest.fixture
def redis() -> Iterator[Redis]:
    with running(Redis()) as server:
        yield server


def test_the_response_cache_is_in_memory_or_in_redis() -> None:
    assert cache_option("", 64) == "local,size=67108864"
    assert cache_option("cache", 64) == "redis,host=cache,port=6379"
    assert cache_option("cache:7000", 64) == "redis,host=cache,port=7000"
    with pytest.raises(ValueError, match="':1' is not HOST"):
        cache_option(":1", 64)


def test_a_voice_is_deleted_with_what_a_redis_has_of_it(redis, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "voices").mkdir()
    for name in ("anna", "bert"):
        (tmp_path / "voices" / f"{name}.wav").touch()
    address = f"127.0.0.1:{redis.server_address[1]}"
    assert command.main(["delete", str(tmp_path), "anna", "--redis", address]) == 1 and redis.entries
    assert "NOAUTH Authentication required" in capsys.readouterr().err
    monkeypatch.setenv("TRITONCACHE_REDIS_PASSWORD", "secret")
    assert command.main(["delete", str(tmp_path), "bert", "--redis", address]) == 0
    assert not redis.entries and not list((tmp_path / "voices").iterdir())
