"""The images of the tests: base images from Debian's packages, cached between runs; on them `cpu` and stand-ins."""

import contextlib
import functools
import hashlib
import http.server
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT
from tests.containers.engine import DOCKER, Engine

HERE = Path(__file__).parent
SUITE = "bookworm"
# The official names -> targets of base.Dockerfile.
BASES = {
    "python:3.11.13-slim-bookworm": "python",
    "nginx:1.28.0": "nginx",
    "redis:7.4.2": "redis",
    "prom/prometheus:v2.53.0": "prometheus",
}
CPU = "cosyvoice2-triton:cpu"
VLLM = "vllm/vllm-openai:v0.25.1"

log = logging.getLogger("containers")


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    log.info("%s ...", what)
    start = time.monotonic()
    yield
    log.info("%s: %.0f s", what, time.monotonic() - start)


def cache() -> Path:
    """The file with the base images; its name changes with their recipe."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cosyvoice2-triton" / "containers"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"bases-{hashlib.sha256((HERE / 'base.Dockerfile').read_bytes()).hexdigest()[:16]}.tar"


def bases(engine: Engine) -> None:
    """Load the base images, or make and cache them."""
    file = cache()
    if file.exists():
        with step(f"loading the base images from {file}"):
            engine.docker("load", "--input", str(file))
        return
    with tempfile.TemporaryDirectory(dir=engine.directory) as root, step("debootstrap"):
        run(["debootstrap", "--variant=minbase", SUITE, root])
        with subprocess.Popen(["tar", "--directory", root, "--create", "."], stdout=subprocess.PIPE) as tar:
            engine.docker("import", "-", f"debian:{SUITE}-minbase", stdin=tar.stdout)
    for name, target in BASES.items():
        with step(f"building {name}"):
            build(engine, name, HERE / "base.Dockerfile", target, HERE)
    for old in file.parent.glob("bases-*"):
        old.unlink()
    with step(f"saving them to {file}"):
        engine.docker("save", "--output", f"{file}.part", *BASES)
        Path(f"{file}.part").rename(file)


def cpu(engine: Engine) -> None:
    """Build our image as a user does, from a base image that has pip's settings of this machine."""
    base = "python:3.11.13-slim-bookworm"
    with tempfile.TemporaryDirectory(dir=engine.directory) as directory, pip_settings(Path(directory)):
        lines = [f"FROM {base}", "COPY certificates.pem /etc/ssl/certs/ca-certificates.crt", "COPY pip.conf /etc/"]
        (Path(directory) / "Dockerfile").write_text("\n".join(lines))
        build(engine, base, Path(directory) / "Dockerfile", "", Path(directory))
        index = os.environ.get("TORCH_INDEX")
        with step(f"building {CPU}"):
            arguments = [f"--build-arg=TORCH_INDEX={index}"] if index else []
            build(engine, CPU, ROOT / "Dockerfile.server", "cpu", ROOT, *arguments)


def vllm(engine: Engine) -> None:
    """A stand-in for vLLM's image, which needs a GPU."""
    build(engine, VLLM, HERE / "vllm.Dockerfile", "", HERE)


def build(engine: Engine, name: str, file: Path, target: str, context: Path, *arguments: str) -> None:
    command = [DOCKER, "build", "--network=host", f"--tag={name}", f"--file={file}", *arguments, str(context)]
    run([*command, f"--target={target}"] if target else command, env=engine.environment)


def run(command: list[str], env: dict[str, str] | None = None) -> None:
    """Run a command; its output is in the log if it fails."""
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        log.error("%s", done.stdout[-6000:])
        done.check_returncode()


@contextlib.contextmanager
def pip_settings(directory: Path) -> Iterator[None]:
    """Write this machine's certificates and pip's indexes to `directory`; serve its folders of wheels to the build."""
    found = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings: dict[str, str] = {}
    for line in found.stdout.splitlines():
        key, _, value = line.partition("=")
        settings[key.split(".", 1)[1]] = value.strip("'")  # the environment's are listed first
    kept = {key: value for key, value in settings.items() if key.endswith("index-url") and value.startswith("http")}
    shutil.copy(settings.get("cert", "/etc/ssl/certs/ca-certificates.crt"), directory / "certificates.pem")
    with contextlib.ExitStack() as stack:
        folders = [Path(word) for word in settings.get("find-links", "").split() if Path(word).is_dir()]
        if folders:
            kept["find-links"] = " ".join(stack.enter_context(served(folder)) for folder in folders)
        lines = ["[global]", "cert = /etc/ssl/certs/ca-certificates.crt", "timeout = 180"]
        (directory / "pip.conf").write_text("\n".join([*lines, *(f"{key} = {kept[key]}" for key in kept)]) + "\n")
        yield


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of a folder, on this machine only."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
