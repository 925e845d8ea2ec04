"""Starting and stopping the real tritonserver, and the messages if that fails."""

import dataclasses
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import httpx2 as httpx
import pytest
import tritonclient.grpc as grpc_client
from cosyvoice_triton.monitoring.environment import METRICS_DIRECTORY
from cosyvoice_triton.server import installation, tritonserver
from cosyvoice_triton.server.tritonserver import STARTS, Ports, ServerError, TritonServer
from tritonclient.utils import InferenceServerException

from tests.support.serve_process import IDLE, with_model
from tests.support.waiting import until

# `caller` calls `slow` 200 times at once; `slow` answers when all have come.
SLOW = """
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        self.senders = []

    def execute(self, requests):
        self.senders += [request.get_response_sender() for request in requests]
        if len(self.senders) == 200:
            output = pb.Tensor("y", np.ones((1, 1), np.float32))
            for sender in self.senders:
                sender.send(pb.InferenceResponse([output]), flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CALLER = """
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        with ThreadPoolExecutor(200) as threads:
            list(threads.map(self.call, range(200)))
        return [pb.InferenceResponse([pb.Tensor("y", np.ones((1, 1), np.float32))]) for _ in requests]

    def call(self, number):
        x = pb.Tensor("x", np.ones((1, 1), np.float32))
        pb.InferenceRequest(model_name="slow", requested_output_names=["y"], inputs=[x]).exec()
"""
FREE = Ports(0, 0, 0)


@pytest.fixture
def repository(tmp_path) -> Path:
    """A repository with a model that loads and does nothing."""
    return with_model(tmp_path / "repository")


def replace_tritonserver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    """A shell script in its place, in which BINARY is the real one."""
    real, script = installation.Installation.find(), tmp_path / "tritonserver"
    script.write_text(f"#!/bin/sh\n{lines}".replace("BINARY", str(real.binary)))
    script.chmod(0o755)
    monkeypatch.setattr(installation.Installation, "find", lambda: dataclasses.replace(real, binary=script))


def stubs_of(prefix: str) -> list[str]:
    return subprocess.run(["pgrep", "-f", prefix], capture_output=True, text=True).stdout.split()


def assert_gone(prefix: str) -> None:
    """Soon no process of the server is left, nor its shared memory."""
    until(lambda: stubs_of(prefix) == [], every=0.1)
    assert list(Path("/dev/shm").glob(f"{prefix}*")) == []


def assert_closed(server: TritonServer) -> None:
    """HTTP and gRPC are this machine's own, and no endpoint registers shared memory."""
    for port in (server.ports.grpc, server.ports.http):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))
    body = {"key": f"/{server._shm_prefix}", "offset": 0, "byte_size": 1}
    register = f"http://{server.http_url}/v2/systemsharedmemory/region/r/register"
    assert httpx.post(register, json=body).status_code == 403
    with grpc_client.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as connection:
        with pytest.raises(InferenceServerException, match="does not have permission|UNAVAILABLE|restricted|header"):
            connection.register_system_shared_memory("r", f"/{server._shm_prefix}", 1)
        assert connection.is_model_ready("idle")


@pytest.mark.server
def test_a_server_answers_while_it_runs_and_leaves_nothing_behind(repository, tmp_path, monkeypatch):
    (tmp_path / "its name; has a blank").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "its name; has a blank"))
    with TritonServer(repository, ports=FREE, host="0.0.0.0") as server:
        for page in (f"{server.http_url}/v2/models/idle/ready", f"{server.metrics_url}/metrics"):
            assert httpx.get(f"http://{page}").status_code == 200
        assert stubs_of(server._shm_prefix)
        assert_closed(server)
        assert server._process is not None
        threading.Timer(0.2, server._process.terminate).start()
        server.wait()  # stopping it from outside is not mistaken for a dead model
    assert not server.log_file.exists()
    assert_gone(server._shm_prefix)


@pytest.mark.server
def test_calls_between_models_do_not_wait_for_each_other(tmp_path):
    """Hundreds of streams wait for their chunks at once; Triton's default thread pool allows only a few calls."""
    repository = with_model(with_model(tmp_path / "repository", "slow", SLOW), "caller", CALLER)
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [0.0]}]}
    with TritonServer(repository, ports=FREE) as server:
        answer = httpx.post(f"http://{server.http_url}/v2/models/caller/infer", json=body, timeout=60)
        assert answer.json()["outputs"][0]["data"] == [1.0]


@pytest.mark.server
def test_a_model_that_does_not_load_is_reported_with_its_own_error(repository):
    (repository / "idle" / "1" / "model.py").write_text("raise ValueError('flow.pt is missing')")
    with pytest.raises(ServerError, match="flow.pt is missing"), TritonServer(repository, ports=FREE):
        pass


@pytest.mark.server
def test_a_server_that_ends_while_it_loads_is_reported_without_its_log(repository, tmp_path, monkeypatch):
    log = tmp_path / "log"
    replace_tritonserver(tmp_path, monkeypatch, f"rm {log}\nexit 3\n")
    with pytest.raises(ServerError, match="ended with code 3: its log .* is empty, or was removed"):
        TritonServer(repository, ports=FREE, log_file=log).__enter__()


@pytest.mark.server
@pytest.mark.parametrize("aborts", [1, STARTS])
def test_a_server_that_aborts_while_loading_is_started_again(aborts, repository, tmp_path, monkeypatch):
    """The real one, which a script aborts during its first starts."""
    starts = tmp_path / "starts"
    abort = f"echo >> {starts}\n[ $(wc -l < {starts}) -le {aborts} ] && (sleep 0.5; kill -s ABRT $$) &\n"
    replace_tritonserver(tmp_path, monkeypatch, f'{abort}exec BINARY "$@"\n')
    (repository / "idle" / "1" / "model.py").write_text(f"import time\ntime.sleep(2)\n{IDLE}")
    server = TritonServer(repository, ports=FREE)
    try:
        with server:
            assert server.answers_ready() and len(server.model_processes()) == 1
    except ServerError as error:
        assert aborts == STARTS and "code -6" in str(error)
    assert len(starts.read_text().splitlines()) == min(aborts + 1, STARTS)
    assert_gone(server._shm_prefix)


@pytest.mark.server
def test_a_server_that_hangs_with_its_models_loaded_is_started_again(repository, tmp_path, monkeypatch):
    """A script in its place hangs once, as tritonserver does that waits for a stub that waits for it. Until then there
    is a model whose C++ backend is not installed here."""
    (repository / "cpp").mkdir()
    (repository / "cpp" / "config.pbtxt").write_text('name: "cpp"\nbackend: "tensorrtllm"\n')
    hang = f'touch {tmp_path}/hung "${METRICS_DIRECTORY}/idle_0_0.metrics"\nexec sleep 1000\n'
    again = f'[ -e {tmp_path}/hung ] && rm -r {repository}/cpp && exec BINARY "$@"\n'
    replace_tritonserver(tmp_path, monkeypatch, again + hang)
    monkeypatch.setattr(tritonserver, "HUNG_SECONDS", 1.0)
    with TritonServer(repository, ports=FREE) as server:
        assert server.answers_ready() and (tmp_path / "hung").exists()


@pytest.mark.server
def test_a_tritonserver_that_crashes_while_it_stops_leaves_nothing_behind_and_is_no_error(repository):
    with TritonServer(repository, ports=FREE) as server:
        process = server._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        threading.Timer(0.3, lambda: [process.send_signal(each) for each in (signal.SIGSEGV, signal.SIGCONT)]).start()
    assert process.returncode == -signal.SIGSEGV
    assert_gone(server._shm_prefix)


@pytest.mark.server
@pytest.mark.parametrize("victims", ["parent", "parent and tritonserver"])
def test_no_process_outlives_a_killed_parent(victims, repository):
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from cosyvoice_triton.server.tritonserver import Ports, TritonServer\n"
        "server = TritonServer(Path(sys.argv[1]), ports=Ports(0, 0, 0)).__enter__()\n"
        "print(server._shm_prefix, server._process.pid, server._work, flush=True)\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(repository)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        prefix, tritonserver, work = parent.stdout.readline().split()
        os.kill(parent.pid, signal.SIGKILL)
        if victims != "parent":
            os.kill(int(tritonserver), signal.SIGKILL)
    assert_gone(prefix)
    until(lambda: not Path(work).exists(), every=0.1)  # the last thing to go


@pytest.fixture
def image(tmp_path, monkeypatch) -> installation.Installation:
    """The wheel's files where NVIDIA's image has them, and no wheel."""
    root, wheel = tmp_path / "opt", installation.Installation.find()
    shutil.copytree(wheel.backend_directory(tmp_path / "unpacked"), root / "backends")
    (root / "bin").mkdir()
    (root / "bin" / "tritonserver").symlink_to(wheel.binary)
    monkeypatch.setattr(installation, "IMAGE_ROOT", root)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    return installation.Installation(root / "bin/tritonserver", root / "backends", root / "caches")


def test_without_the_wheel_the_images_tritonserver_is_found(image, tmp_path, monkeypatch):
    assert installation.Installation.find() == image and image.backend_directory(tmp_path) == image.backends
    monkeypatch.setattr(installation, "IMAGE_ROOT", tmp_path / "nowhere")
    with pytest.raises(ServerError, match="run: make setup"):
        installation.Installation.find()


def test_the_wheels_stub_can_be_executed_also_if_an_installer_has_dropped_its_mode(tmp_path):
    wheel = installation.Installation.find()
    assert wheel.stub is not None
    stub = Path(shutil.copyfile(wheel.stub, tmp_path / wheel.stub.name))
    assert not os.stat(stub).st_mode & 0o111
    directory = dataclasses.replace(wheel, stub=stub).backend_directory(tmp_path)
    assert os.stat(directory / "python" / stub.name).st_mode & 0o111 == 0o111


@pytest.mark.parametrize("where", ["wheel", "image"])
def test_a_numpy_with_which_models_misread_strings_is_refused_wherever_the_server_is(where, request, monkeypatch):
    """By what its stub was built for: the wheel's, the same files elsewhere, and one that knows numpy 2."""
    image = request.getfixturevalue("image") if where == "image" else None
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.5.2" if name == "numpy" else "")
    refusal = r"needs numpy 1.26; this Python has 2.5.2; run: .* -m pip install 'numpy<2'"
    with pytest.raises(ServerError, match=refusal):
        installation.Installation.find()
    if image is not None:
        (image.backends / "python" / installation.STUB).write_bytes(b"imports numpy._core.multiarray")
        assert installation.Installation.find() == image
