"""The commands of compose's `tts` and `speech` under a container's conditions, for a machine without a Docker engine.

    python -m tests.containers.without_docker VOLUME [--device gpu] [--stack dit] [--weights random-full]      as root

container.sh has the conditions. Not so: the image (this Python instead), cgroups, seccomp, networks, the gateway,
NVIDIA's toolkit. The weights are random. The ports 8000 to 8003 and 10086 must be free, and VOLUME, this Python and the
clone not below /tmp, which each container hides.
"""

import argparse
import atexit
import base64
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import yaml
from cosyvoice_triton import samples, stacks

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "out/containers"
HOME = "/opt/cosyvoice-triton"  # the image's WORKDIR
LOAD_SECONDS, STOP_SECONDS = 600, 90  # `start_period`, `stop_grace_period`
CONTAINER = ROOT / "tests/containers/container.sh"


def settings(name: str, file: str = "services.yml") -> dict:
    """A service of compose, with this process's variables or their defaults."""
    text = (ROOT / "deploy/compose" / file).read_text()
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: os.environ.get(found[1]) or found[2], text)
    return yaml.load(text.replace("$$", "$"), yaml.BaseLoader)["services"][name]


class Container:
    """A running command; `log` has its output."""

    def __init__(self, name: str, volume: Path, command: list[str], where: str = HOME, **variables: str) -> None:
        base = settings("base")
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
        kept |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": "/home/tts"}
        self._environment = kept | base["environment"] | {"PYTHONUNBUFFERED": "1"} | variables
        self.log = LOGS / f"{name}.log"
        run = [CONTAINER, "run", volume, base["shm_size"].rstrip("b"), where, *command]
        with self.log.open("w") as file:
            self._process = subprocess.Popen(run, env=self._environment, stdout=file, stderr=subprocess.STDOUT)
        atexit.register(self._process.kill)

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command inside, as `docker exec` runs it."""
        inside = [CONTAINER, "exec", str(self._process.pid), HOME, *command]
        return subprocess.run(inside, env=self._environment, capture_output=True, text=True, check=False)

    def wait_healthy(self, url: str) -> float:
        start = time.monotonic()  # the images' HEALTHCHECK:
        while self.execute("cosyvoice-triton", "wait", "--seconds", "0", url).returncode:
            late = time.monotonic() - start > LOAD_SECONDS
            assert self._process.poll() is None and not late, self.log.read_text()[-4000:]
        return time.monotonic() - start

    def stop(self) -> None:
        self.execute("kill", "-TERM", "1")

    def wait(self, seconds: float, code: int = 0) -> None:
        assert self._process.wait(seconds) == code, self.log.read_text()[-4000:]


def say(text: str, begun: Callable[[], None]) -> float:
    """The seconds of an answer in the voice of a recording; `begun` is called once its first byte is here."""
    recording = base64.b64encode((samples.FOLDER / "reference_en.wav").read_bytes()).decode()
    body = json.dumps({"input": text, "response_format": "pcm", "ref_audio": recording}).encode()
    url, headers = "http://127.0.0.1:10086/v1/audio/speech", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=300) as answer:
        first = answer.read(1)
        begun()
        return len(first + answer.read()) / 48_000


def serve(stack: str, start: str, volume: Path, gpu: bool) -> None:
    service, llm, speech = settings("tts"), settings("tts-cuda", "llm.yml"), settings("speech")
    variables = service["environment"] | llm["environment"] | {"STACK": stack, "DEVICE": "gpu" if gpu else "cpu"}
    served = Container(f"{stack}-{start}", volume, service["command"], service["working_dir"], **variables)
    took = served.wait_healthy("http://127.0.0.1:8003/ready")
    refused = served.execute("touch", f"{HOME}/x", f"{HOME}/common/x", "/usr/x", "/dev/x").stderr
    assert refused.count("Read-only file system") + refused.count("Permission denied") == 4, refused
    assert served.execute("touch", "/models/x", "/tmp/x", "/dev/shm/x").returncode == 0
    assert not gpu or "nvidia-cuda-mps" in served.execute("sh", "-c", "cat /proc/[0-9]*/comm").stdout, "no MPS"
    speaking = Container(f"{stack}-{start}-speech", volume, speech["command"], **speech["environment"])
    speaking.wait_healthy(speech["healthcheck"]["test"][-1])
    seconds = say("A server that stops goes on. " * 9, begun=served.stop)
    served.wait(STOP_SECONDS)
    speaking.stop()
    speaking.wait(STOP_SECONDS, 143)
    kept = sum(path.is_file() for path in (volume / ".cache").rglob("*"))
    assert kept or not gpu, "no kernels in the volume"
    print(f"{stack}, {start} start: healthy after {took:.0f} s, {kept} kernel files; {seconds:.1f} s spoken at SIGTERM")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("volume", type=Path)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--stack", nargs="+", default=[stack.name for stack in stacks.BUILT_IN])
    parser.add_argument("--weights", default="random")
    args = parser.parse_args()
    volume = args.volume.resolve()
    LOGS.mkdir(parents=True, exist_ok=True)
    volume.mkdir(parents=True, exist_ok=True)
    os.chown(volume, 1001, 1001)  # as a named volume, which gets the owner of the image's folder
    make = ["python3", "-m", "tests.random_weights", "/models", "--weights", args.weights]
    Container("download", volume, make).wait(LOAD_SECONDS)
    for stack in args.stack:
        for start in ("first", "second"):
            serve(stack, start, volume, args.device == "gpu")


if __name__ == "__main__":
    main()
