"""Starting and stopping the real tritonserver, and the messages if that fails. What belongs to a server: its ports,
which are chosen and what other machines reach; its log, kept over restarts and bounded; its response cache, in which
nothing of a deleted voice stays."""

import dataclasses
import importlib.util
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx2 as httpx
import pytest
import tritonclient.grpc as grpc_client
from cosyvoice_triton.cli import serve
from cosyvoice_triton.cli import voice as command
from cosyvoice_triton.monitoring.environment import METRICS_DIRECTORY
from cosyvoice_triton.server import installation, logs, tritonserver
from cosyvoice_triton.server.logs import KEPT, LogRotation, failure
from cosyvoice_triton.server.readiness import fault
from cosyvoice_triton.server.response_cache import cache_option
from cosyvoice_triton.server.tritonserver import STARTS, Ports, ServerError, TritonServer, free_port, usable_ports
from tritonclient.utils import InferenceServerException

from tests.support.http_servers import echo_server, running
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
        assert not server.answers_ready()
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
    log.unlink()
    assert failure(log) == f"its log {log} is empty, or was removed"


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
