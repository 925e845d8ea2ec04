"""Ports of servers: which are chosen, what a probe says until they answer, what other machines reach."""

import socket
from contextlib import suppress
from pathlib import Path

import pytest
from cosyvoice_triton.cli import serve
from cosyvoice_triton.server.readiness import fault
from cosyvoice_triton.server.tritonserver import Ports, TritonServer, free_port, usable_ports

from tests.support.http_servers import echo_server


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


def test_a_server_for_all_hosts_keeps_tritons_own_endpoints_on_this_machine(tmp_path: Path) -> None:
    server = TritonServer(tmp_path, ports=Ports(0, 0, 0), host="0.0.0.0")
    assert server.grpc_url.startswith("127.0.0.1:") and server.http_url.startswith("127.0.0.1:")
    assert server.metrics_url.startswith("0.0.0.0:")


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
