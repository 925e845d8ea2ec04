"""A tritonserver as a context manager: start it, wait until it is ready, drain it, stop it.

If something is missing, a `ServerError` names it in one line with the command that installs it.
"""

import errno
import itertools
import logging
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cosyvoice_triton.addresses import join
from cosyvoice_triton.constants import CALL_THREADS, GRPC_PORT, HTTP_PORT, METRICS_PORT
from cosyvoice_triton.monitoring import metrics
from cosyvoice_triton.monitoring.environment import (
    DRAIN_FILE,
    GRPC_ADDRESS,
    METRICS_DIRECTORY,
    tritonserver_environment,
)
from cosyvoice_triton.monitoring.health import STACKS_SIGNAL, Notice
from cosyvoice_triton.replicas import first_replica
from cosyvoice_triton.server.installation import Installation, ServerError, compile_library, work_directory
from cosyvoice_triton.server.logs import MAX_BYTES, LogRotation, failure
from cosyvoice_triton.server.readiness import fault
from cosyvoice_triton.server.watch import WATCH_SECONDS, ModelWatch

logger = logging.getLogger(__name__)

READY_POLL_SECONDS = 0.1
INHERITED = Path("-")
LOOPBACK = "127.0.0.1"
# A caller could name a region of shared memory that is the models' own (CVE-2025-23319, -23320, -23334, before 25.07).
CLOSED_APIS = "shared-memory,trace,logging"
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
EPHEMERAL_DEFAULT = 32768, 60999  # Linux's
CACHE_MIB = 64  # default size of the local response cache
STARTS = 3
HUNG_SECONDS = 60.0  # after the last instance has been loaded; the server is ready within one
LOAD_SECONDS = 600  # for all models to load, and for each of them
STACKS_SECONDS = 0.2  # for models to write their stacks
STOP_SECONDS = 12  # to finish running requests and unload the models; then the process group is killed
SWEEP = Path(__file__).with_name("sweep.sh")  # ends what is left of a server


@dataclass(frozen=True)
class Ports:
    """The server's ports. 0: any free port, chosen at construction of the server."""

    http: int = HTTP_PORT
    grpc: int = GRPC_PORT
    metrics: int = METRICS_PORT


def usable_ports(ephemeral: Path = EPHEMERAL) -> list[int]:
    """Return ports for servers, in order from a random one: those that the kernel gives to no client.

    A port of the ephemeral range may become the source port of any connection before its server has bound it. Then the
    bind fails, and a client that asks the port can be given the same port and connects to itself.
    """
    try:
        low, high = map(int, ephemeral.read_text().split())
    except OSError:
        low, high = EPHEMERAL_DEFAULT
    ports = range(20_000, 65_536)  # above the default ports of this project
    outside = [port for port in ports if not low <= port <= high] or list(ports)
    first = random.randrange(len(outside))
    return outside[first:] + outside[:first]


_ports = itertools.cycle(usable_ports())


def free_port() -> int:
    """Return a TCP port that is free at this moment; the next higher one at the next call."""
    for port in _ports:
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise AssertionError("cycle() does not end")


def require_free(port: int, host: str) -> None:
    """Raise ServerError if `port` is in use or none, or `host` is no address of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ServerError(
                    f"cannot listen on {join(host, port)}: {error.strerror}; a host must be an address of this "
                    "machine, such as 127.0.0.1 or 0.0.0.0"
                ) from None
            raise ServerError(
                f"port {port} is in use ({error.strerror}); stop the process on it (ss -ltnp 'sport = :{port}') "
                "or choose others, such as --grpc-port 8101; for make HTTP_PORT=8100 GRPC_PORT=8101 METRICS_PORT=8102 "
                "HEALTH_PORT=8103 SPEECH_PORT=8186"
            ) from None
        except OverflowError:
            raise ServerError(f"{port} is no port: choose one from 0 to 65535") from None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put SIGTERM and Ctrl-C off until the end of the block. Only the main thread gets them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    numbers = signal.SIGTERM, signal.SIGINT
    before = [signal.signal(number, lambda signum, frame: caught.append(signum)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        if caught:
            signal.raise_signal(caught[0])


def _for_evhtp(host: str) -> str:
    """Return an address as the library of Triton's HTTP and metrics endpoints reads it."""
    return f"ipv6:{host}" if ":" in host else host


class TritonServer:
    """`with TritonServer(repository, ports=Ports(0, 0, 0)) as server: ... server.grpc_url`.

    http_host, grpc_host: addresses of Triton's endpoints; other than this machine's own only behind the gateway, which
    does not forward what can crash them (SECURITY.md). host: of everything else.

    cache: Triton's --cache-config, for the response cache of the prompt models. log_file: the server's output; by
    default in a temporary directory that `stop` removes; INHERITED: this process's output. The server and its stubs are
    one process group, which ends with this process.
    """

    def __init__(
        self,
        repository: Path,
        *,
        ports: Ports = Ports(),
        host: str = LOOPBACK,
        http_host: str = LOOPBACK,
        grpc_host: str = LOOPBACK,
        cache: str = f"local,size={CACHE_MIB << 20}",
        log_file: Path | None = None,
    ) -> None:
        self.repository = repository
        self.host = host
        self.http_host = http_host
        self.grpc_host = grpc_host
        chosen = [port or free_port() for port in (ports.http, ports.grpc, ports.metrics)]
        self.ports = Ports(*chosen)
        self.http_url = join(http_host, self.ports.http)
        self.grpc_url = join(grpc_host, self.ports.grpc)
        self.metrics_url = join(host, self.ports.metrics)
        self._cache = cache
        self._work = work_directory()
        self.log_file = log_file or self._work / "server.log"
        self._rotation = LogRotation(self.log_file)
        self.metrics_directory = self._work / "metrics"  # of our models, see monitoring/metrics.py
        self._drain = Notice(self._work / "draining")
        paths = {METRICS_DIRECTORY: self.metrics_directory, DRAIN_FILE: self._drain.path}
        self._variables = {name: str(path) for name, path in paths.items()} | {GRPC_ADDRESS: self.grpc_url}
        self._shm_prefix = f"tts_{uuid.uuid4().hex[:12]}_"
        self._process: subprocess.Popen[bytes] | None = None
        self._sweeper: subprocess.Popen[bytes] | None = None
        self._models: dict[int, str] = {}  # those that were running when the server became ready
        self.watch = ModelWatch(self.metrics_directory)  # as of the last `check_models`
        self._unloading = 0.0  # seconds for which models have been missing

    def __enter__(self) -> "TritonServer":
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process. ServerError if a port is in use or something is missing on this machine."""
        installation = Installation.find()
        if self.log_file.is_dir():
            raise ServerError(f"the log file {self.log_file} is a folder; name a file: {self.log_file}/server.log")
        require_free(self.ports.http, self.http_host)
        require_free(self.ports.grpc, self.grpc_host)
        require_free(self.ports.metrics, self.host)
        self._work.mkdir(exist_ok=True)
        backends = installation.backend_directory(self._work)
        self.metrics_directory.mkdir()
        (self._work / "models").symlink_to(self.repository.resolve())  # its backend cuts paths at blanks
        self._drain.reserve()
        command = [str(installation.binary), *self._options(backends, installation.caches)]
        with ExitStack() as files:
            self._rotation.rotate()  # what an earlier server wrote before it ended
            log = None if self.log_file == INHERITED else files.enter_context(self.log_file.open("ab"))
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=tritonserver_environment(self._variables, installation.libraries, compile_library(self._work)),
                start_new_session=True,
            )
        sweep = ("/bin/sh", SWEEP, self._process.pid, self._shm_prefix, STOP_SECONDS, self._work)
        self._sweeper = subprocess.Popen(
            [*map(str, sweep)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        """Return when every model is ready. ServerError with the log's error lines if the server ends before that.

        A server that aborts, or hangs with all its models loaded, is started again, STARTS times in all. Triton's
        python backend sometimes aborts while models load (triton-inference-server/server#8882), and was once seen to
        wait for the end of a stub that waited for its first request.
        """
        assert self._process is not None, "start() comes first"
        begun = changed = time.monotonic()
        starts, loaded = 1, set[str]()
        while not self.answers_ready():
            now, before = time.monotonic(), loaded
            # Publishing its metrics is the last thing that an instance does to be loaded.
            loaded = {path.stem for path in self.metrics_directory.glob(f"*{metrics.ENDING}")}
            changed = changed if loaded == before else now
            hangs = now - changed > HUNG_SECONDS and self._all_loaded(loaded)
            if (hangs or self._process.poll() == -signal.SIGABRT) and starts < STARTS:
                starts, changed = starts + 1, now
                what = "hung with all its models loaded" if hangs else "aborted while it loaded its models"
                logger.warning("tritonserver %s; starting it again: %s", what, self._failure())
                self._end()
                self.start()
            elif self._process.poll() is not None:
                raise ServerError(f"tritonserver ended with code {self._process.returncode}: {self._failure()}")
            if now - begun > LOAD_SECONDS:
                raise ServerError(f"tritonserver was not ready after {LOAD_SECONDS} s: {self._failure()}")
            time.sleep(READY_POLL_SECONDS)
        self._models = self.model_processes()

    def _all_loaded(self, instances: set[str]) -> bool:
        """Return whether there is one of each model of the Python backend; C++ ones publish nothing."""
        configs = self.repository.glob("*/config.pbtxt")
        models = {path.parent.name for path in configs if 'backend: "python"' in path.read_text()}
        return {re.sub(r"_\d+_\d+$", "", instance) for instance in instances} >= models

    def answers_ready(self) -> bool:
        """Return whether every model is loaded and the metrics can be read."""
        # gRPC starts listening before HTTP, the metrics page after it.
        pages = f"http://{self.http_url}/v2/health/ready", f"http://{self.metrics_url}/metrics"
        return all(fault(page) is None for page in pages)

    def refuse_new(self) -> None:
        """Let the orchestrators answer new requests with UNAVAILABLE from now on; running ones continue."""
        self._drain.give()

    def live_requests(self) -> int:
        """Count the requests in progress, as of half a second ago. Raise ServerError if the server has ended."""
        if self._process is None or self._process.poll() is not None:
            raise ServerError("tritonserver has ended")
        return int(metrics.sum_of(metrics.page(self.metrics_directory), metrics.LIVE.name))

    def wait(self) -> None:
        """Block until the server is stopped from outside. ServerError if it ends otherwise, or if a model has died,
        hangs or has failed: then the server is killed, because its requests would wait until it is stopped. It goes on
        without a replica of a model while another one works.

        Triton 2.51 neither restarts a model's process nor reports itself as not ready: the server has to be restarted.
        """
        assert self._process is not None, "start() comes first"
        while self._process.poll() is None:
            self.check_models()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(WATCH_SECONDS)
        if code := self._process.returncode:
            cause = self.watch.why_not_ready() or f"see {self.log_file}"
            raise ServerError(f"tritonserver ended unexpectedly with code {code}: {cause}")

    def check_models(self) -> None:
        """Kill the server and raise ServerError if a model has died, hangs or has failed, unless a replica of it works.
        It must be called every WATCH_SECONDS."""
        self._rotation.rotate(above=MAX_BYTES)
        faults = self.watch.check()
        running = self.model_processes()
        if dead := self._models.keys() - running.keys():
            self._unloading += WATCH_SECONDS  # a server that is being stopped is not ready while it ends its models
            if self._unloading > STOP_SECONDS or self.answers_ready():
                for model in sorted({self._models[pid] for pid in dead}):
                    faults.setdefault(model, f"the process of model {model} has died")
        if faults:
            self.write_stacks(faults)
        working = {first_replica(model) for model in set(self._models.values()) - faults.keys()}
        if any(first_replica(model) not in working for model in faults):
            self.kill()
            raise ServerError(f"{'; '.join(faults.values())}; tritonserver has to be restarted")
        for model, reason in faults.items():
            self._lose(model, reason)

    def write_stacks(self, models: Container[str] | None = None) -> None:
        """Have our models that still run, or some of them, write the Python stacks of their threads to the log."""
        for process, model in self.model_processes().items():
            if model in (self.watch.models if models is None else models) and model in self.watch.models:
                with suppress(ProcessLookupError):
                    os.kill(process, STACKS_SIGNAL)
        time.sleep(STACKS_SECONDS)

    def _lose(self, model: str, reason: str) -> None:
        """Go on without a model. Its process is ended: what hangs may come back, and would get no requests."""
        logger.error("%s; the server goes on without it until it is restarted", reason)
        for process in [process for process, name in self._models.items() if name == model]:
            del self._models[process]
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.watch.lose(model, reason)
        self._unloading = 0.0

    def kill(self) -> None:
        """End the server and its models at once, so that no client waits for an answer that cannot come."""
        assert self._process is not None, "start() comes first"
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def model_processes(self) -> dict[int, str]:
        """Return the running model processes, one per instance: process id -> name of the model."""
        assert self._process is not None, "start() comes first"
        found = {}
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                # In bytes: the kernel cuts names at 15 bytes, within a character if it comes to that.
                parent = int((directory / "stat").read_bytes().rpartition(b")")[2].split()[1])
                command = (directory / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it has ended in the meantime
                continue
            if parent == self._process.pid and len(command) > 1:  # stub .../MODEL/1/model.py ...
                found[int(directory.name)] = Path(os.fsdecode(command[1])).parent.parent.name
        return found

    def stop(self) -> None:
        """Stop the server and everything it started. Safe to call twice."""
        self._end()
        shutil.rmtree(self._work, ignore_errors=True)

    def _end(self) -> None:
        """End the process, if there is one, its stubs and their shared memory."""
        if self._process is None:
            return
        try:
            self._process.terminate()
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("tritonserver did not end within %.0f s of SIGTERM; killing it", STOP_SECONDS)
        finally:  # also if a second signal ends the wait
            with uninterrupted():
                if self._sweeper is not None:
                    self._sweeper.communicate(b"\n")
                self._process.wait()
                self._process = None

    def _options(self, backends: Path, caches: Path) -> list[str]:
        nobody = f"{CLOSED_APIS}:nobody={secrets.token_hex(16)}"  # the header that callers of these would have to send
        return [
            f"--model-repository={self._work / 'models'}",
            f"--backend-directory={backends}",
            f"--cache-directory={caches}",
            f"--cache-config={self._cache}",
            f"--http-address={_for_evhtp(self.http_host)}",
            f"--http-port={self.ports.http}",
            f"--grpc-address={f'[{self.grpc_host}]' if ':' in self.grpc_host else self.grpc_host}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-address={_for_evhtp(self.host)}",
            f"--metrics-port={self.ports.metrics}",
            f"--http-restricted-api={nobody}",
            f"--grpc-restricted-protocol={nobody}",
            # Our configurations are complete; auto-completion would start every stub a second time.
            "--disable-auto-complete-config",
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
            f"--backend-config=python,thread-pool-size={CALL_THREADS}",
            # The default 30 s are too short for a checkpoint.
            f"--backend-config=python,stub-timeout-seconds={LOAD_SECONDS}",
            f"--exit-timeout-secs={STOP_SECONDS - 4}",
        ]

    def _failure(self) -> str:
        return "see above" if self.log_file == INHERITED else failure(self.log_file)
