"""A Docker engine of the tests' own: started in a temporary directory, removed with everything that it has made.

python -m tests.containers.engine     prints why no engine can be started here, with exit code 1; else ends with 0
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cosyvoice_triton.server.tritonserver import uninterrupted

from tests.support.programs import MISSING, compose_command, ran

DOCKER = "/usr/bin/docker"  # Debian's, which can build with BuildKit without a plugin
DAEMON = "/usr/sbin/dockerd"
PACKAGES = {DOCKER: "docker.io", DAEMON: "docker.io", "/usr/sbin/debootstrap": "debootstrap"}
PACKAGES |= {"/usr/sbin/iptables": "iptables", "/usr/bin/xz": "xz-utils"}
START_SECONDS, STOP_SECONDS = 60, 60
# No rule of the machine's firewall, no bridge and no forwarding is changed. 198.18.0.0/16 is for tests of networks.
OPTIONS = (
    "--storage-driver=overlay2 --iptables=false --ip6tables=false --ip-forward=false --bridge=none "
    "--userland-proxy=true --default-address-pool base=198.18.0.0/16,size=24 "
    "--exec-opt native.cgroupdriver=cgroupfs"
).split()


class ProvisionError(RuntimeError):
    """No engine can be started here, or no image can be made because a server of packages cannot be reached."""


class Engine:
    """A running dockerd, and the names of the images that the tests have made in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.address = f"unix://{directory}/docker.sock"
        self.images: set[str] = set()

    @property
    def environment(self) -> dict[str, str]:
        config = str(self.directory / "config")
        return os.environ | {"DOCKER_HOST": self.address, "DOCKER_CONFIG": config, "DOCKER_BUILDKIT": "1"}

    def docker(self, *arguments: str) -> str:
        """The output of a docker command, which must succeed."""
        return ran(DOCKER, *arguments, **self.environment).stdout.strip()

    def lines(self, *arguments: str) -> list[str]:
        return self.docker(*arguments).split()

    def clear(self) -> None:
        """Remove all containers, networks and volumes."""
        if containers := self.lines("ps", "--all", "--quiet"):
            self.docker("rm", "--force", "--volumes", *containers)
        self.docker("network", "prune", "--force")
        self.docker("volume", "prune", "--force")


def missing() -> str:
    """Why no engine can be started, as far as can be seen without trying; empty if nothing is missing."""
    if os.geteuid() != 0:
        return "only root can start dockerd"
    if packages := sorted({package for path, package in PACKAGES.items() if not Path(path).exists()}):
        return f"missing; run: apt-get install --no-install-recommends {' '.join(packages)}"
    return "" if compose_command() else MISSING


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    """ProvisionError if it does not start. At the end nothing of it is left, also after an error."""
    if reason := missing():
        raise ProvisionError(reason)
    directory = Path(tempfile.mkdtemp(prefix="docker-engine-"))
    started = Engine(directory)
    try:
        with running(directory) as process:
            wait(started, process)
            try:
                yield started
            finally:
                started.clear()
    finally:
        with uninterrupted():  # also by the end of CI's time: gigabytes are removed
            for mount in reversed(mounts(directory)):
                subprocess.run(["umount", "--lazy", mount], check=False)
            shutil.rmtree(directory)


@contextlib.contextmanager
def running(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """dockerd as a process, in a session of its own: Ctrl-C reaches the tests, which then end it."""
    places = [f"--data-root={directory}/data", f"--exec-root={directory}/exec", f"--pidfile={directory}/docker.pid"]
    command = [DAEMON, *OPTIONS, *places, f"--host=unix://{directory}/docker.sock"]
    with (
        (directory / "log").open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True) as process,
    ):
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def wait(started: Engine, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while subprocess.run([DOCKER, "version"], env=started.environment, capture_output=True).returncode:
        if process.poll() is not None or time.monotonic() > deadline:
            lines = (started.directory / "log").read_text(errors="replace").splitlines() or ["it wrote nothing"]
            said = re.search(r"(?:msg=|failed to start daemon: )(.*)", lines[-1])
            raise ProvisionError(f"dockerd does not start: {said[1] if said else lines[-1]}")
        time.sleep(0.2)


def mounts(directory: Path) -> list[str]:
    """Mount points below a directory, outer ones first."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if point.startswith(f"{directory}/")]


def main() -> int:
    try:
        with engine():
            return 0
    except ProvisionError as error:
        print(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
