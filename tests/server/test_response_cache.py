"""Triton's response cache: where it is, and that nothing of a deleted voice stays in a Redis."""

import socketserver
from collections.abc import Iterator

import pytest
from cosyvoice_triton.cli import voice as command
from cosyvoice_triton.server.response_cache import cache_option

from tests.support.http_servers import running


class Redis(socketserver.ThreadingTCPServer):
    """A Redis with a password and one entry."""

    def __init__(self) -> None:
        self.entries = {"hash of a recording": b"speech tokens"}
        super().__init__(("127.0.0.1", 0), Connection)


class Connection(socketserver.StreamRequestHandler):
    server: Redis

    def handle(self) -> None:
        known = False
        while count := self.rfile.readline().strip().removeprefix(b"*"):
            words = [self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2] for _ in range(int(count))]
            known = known or words == [b"AUTH", b"secret"]
            if known and words == [b"FLUSHDB"]:
                self.server.entries.clear()
            self.wfile.write(b"+OK\r\n" if known else b"-NOAUTH Authentication required.\r\n")


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
