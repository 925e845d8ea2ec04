"""Which of Triton's ports accept connections of other machines."""

from pathlib import Path

import pytest
from cosyvoice_triton.cli import serve
from cosyvoice_triton.server.tritonserver import Ports, TritonServer


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
def test_serve_says_what_other_machines_can_reach(
    options: list[str], warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert serve.main([str(tmp_path / "no repository"), *options]) == 1
    assert warning in caplog.text
