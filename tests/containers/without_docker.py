"""The commands of compose's `tts` and `speech` under a container's conditions, for a machine without a Docker engine.

    python -m tests.containers.without_docker VOLUME [--device gpu] [--stack dit] [--weights random-full]      as root

As deploy/compose/services.yml says, each has: user 1001 without capabilities; a process 1 that passes SIGTERM on; of
the devices only a GPU's; /dev/shm of its size; and VOLUME and /tmp are all that it can write. Not so: the image (this
Python instead), cgroups, seccomp, networks, the gateway, NVIDIA's toolkit. The weights are random. The ports 8000 to
8003 and 10086 must be free, and VOLUME, this Python and the clone not below /tmp, which each container hides.
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
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import yaml
from cosyvoice_triton import samples, stacks

ROOT = Path(__file__).resolve().parents[2]
USER = 1001
HOME = "/opt/cosyvoice-triton"  # the image's WORKDIR
LOAD_SECONDS, STOP_SECONDS = 600, 90  # `start_period`, `stop_grace_period`
READY = ("cosyvoice-triton", "wait", "--seconds", "0")  # the image's HEALTHCHECK
AS_USER = f"setpriv --reuid {USER} --regid {USER} --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all"
# Arguments: volume, size of /dev/shm, working directory, command.
_CONTAINER = rf"""
mount --make-rprivate /
mkdir -p /models {HOME}
mount --bind "$1" /models
mount --bind {ROOT} {HOME}
files=$(mktemp -d)
{{ cat /etc/passwd; echo tts:x:{USER}:{USER}::/home/tts:/bin/bash; }} >"$files/passwd"
echo 127.0.0.1 localhost tts speech gateway >"$files/hosts"
for name in passwd hosts; do mount --bind "$files/$name" "/etc/$name"; done
mount -t tmpfs -o mode=755 dev /mnt
for file in /dev/{{null,zero,full,random,urandom,tty,nvidia[0-9]*,nvidiactl,nvidia-uvm*}}; do
    [[ ! -c $file ]] || {{ : >"/mnt/${{file##*/}}"; mount --bind "$file" "/mnt/${{file##*/}}"; }}
done
mkdir /mnt/shm
mount -t tmpfs -o mode=1777,size="$2" shm /mnt/shm
mount --move /mnt /dev
ln -s /proc/self/fd /dev/fd
mount -t tmpfs -o mode=1777,exec tmp /tmp
mount -t proc proc /proc
while read -r _ _ _ _ point _; do
    [[ $point =~ ^/(proc|dev|models|tmp)(/|$) ]] || mount -o remount,bind,ro "$point" || echo "not read-only: $point"
done </proc/self/mountinfo
cd "$3"
shift 3
init='trap "kill -TERM \$!" TERM; "$@" & until wait $!; do code=$?; kill -0 $! || exit $code; done 2>&-'
exec {AS_USER} bash -c "$init" init "$@"
"""


def settings(name: str, file: str = "services.yml") -> dict:
    """A service of compose, with this process's variables or their defaults."""
    text = (ROOT / "deploy/compose" / file).read_text()
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: os.environ.get(found[1]) or found[2], text)
    return yaml.load(text.replace("$$", "$"), yaml.BaseLoader)["services"][name]


class Container:
    """A running command; `log` has its output."""

    def __init__(
        self, volume: Path, log: Path, command: list[str], variables: dict[str, str], where: str = HOME
    ) -> None:
        base = settings("base")
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
        kept |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": "/home/tts"}
        self._environment = kept | base["environment"] | {"PYTHONUNBUFFERED": "1"} | variables
        self.log = log
        inside = ["bash", "-euo", "pipefail", "-c", _CONTAINER, "container", str(volume)]
        self._process = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
            + [*inside, base["shm_size"].rstrip("b"), where, *command],
            env=self._environment,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        atexit.register(self._process.kill)

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command inside, as `docker exec` runs it."""
        process = self._process.pid
        spaces = [f"--target={process}", "--mount", "--ipc", f"--pid=/proc/{process}/ns/pid_for_children"]
        inside = ["nsenter", *spaces, *AS_USER.split(), "bash", "-c", f'cd {HOME} && exec "$@"', "exec", *command]
        return subprocess.run(inside, env=self._environment, capture_output=True, text=True, check=False)

    def wait(self, seconds: float) -> int:
        return self._process.wait(seconds)

    def wait_healthy(self, url: str) -> float:
        start = time.monotonic()
        while self.execute(*READY, url).returncode:
            assert self._process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() - start < LOAD_SECONDS, self.log.read_text()[-4000:]
        return time.monotonic() - start

    def stop(self) -> float:
        start = time.monotonic()
        self.execute("kill", "-TERM", "1")
        assert self.wait(STOP_SECONDS) in (0, 143), self.log.read_text()[-4000:]
        return time.monotonic() - start


def say(text: str, begun: Callable[[], object] = lambda: None) -> int:
    """The size of an answer in the voice of a recording; `begun` is called once its first byte is here."""
    recording = base64.b64encode((samples.FOLDER / "reference_en.wav").read_bytes()).decode()
    body = json.dumps({"input": text, "response_format": "pcm", "ref_audio": recording}).encode()
    url, headers = "http://127.0.0.1:10086/v1/audio/speech", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=300) as answer:
        first = answer.read(1)
        begun()
        return len(first + answer.read())


def try_stack(stack: str, volume: Path, logs: Path, device: str) -> None:
    def tts(run: str) -> Container:
        service, llm = settings("tts"), settings("tts-cuda", "llm.yml")
        variables = service["environment"] | llm["environment"] | {"STACK": stack, "DEVICE": device}
        return Container(volume, logs / f"{stack}-{run}.log", service["command"], variables, service["working_dir"])

    def kernels() -> int:
        return sum(path.is_file() for path in (volume / ".cache").rglob("*"))

    if device == "gpu":
        ask = ["cosyvoice-triton", "doctor", "/models", "--stack", stack, "--device", device]
        asked = Container(volume, logs / f"{stack}-doctor.log", ask, {})
        print(f"{stack}: doctor ends with {asked.wait(60)}:\n{asked.log.read_text()}")
    served = tts("first")
    print(f"{stack}: healthy after {served.wait_healthy('http://127.0.0.1:8003/ready'):.0f} s", flush=True)
    refused = served.execute("touch", f"{HOME}/x", f"{HOME}/common/x", "/usr/x", "/dev/x")
    assert refused.stderr.count("Read-only file system") + refused.stderr.count("Permission denied") == 4, refused
    assert served.execute("touch", "/models/x", "/tmp/x", "/dev/shm/x").returncode == 0
    assert device == "cpu" or "nvidia-cuda-mps" in served.execute("sh", "-c", "cat /proc/[0-9]*/comm").stdout
    speech = settings("speech")
    speaking = Container(volume, logs / f"{stack}-speech.log", speech["command"], speech["environment"])
    speaking.wait_healthy(speech["healthcheck"]["test"][-1])
    assert say("Hello there.") > 10_000
    with ThreadPoolExecutor() as pool:
        stopping: list[Future[float]] = []
        size = say("A server that stops goes on. " * 9, lambda: stopping.append(pool.submit(served.stop)))
        print(f"{stack}: stopped in {stopping[0].result():.0f} s, its stream of {size / 48_000:.0f} s is whole")
    speaking.stop()
    before = kernels()
    served = tts("second")
    took = served.wait_healthy("http://127.0.0.1:8003/ready")
    served.stop()
    print(f"{stack}: healthy again after {took:.0f} s; {before} files of kernels kept, {kernels() - before} added")
    assert device == "cpu" or before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("volume", type=Path)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--stack", nargs="+", default=[stack.name for stack in stacks.BUILT_IN])
    parser.add_argument("--weights", default="random")
    args = parser.parse_args()
    volume, logs = args.volume.resolve(), ROOT / "out/containers"
    for folder in (volume, logs):
        folder.mkdir(parents=True, exist_ok=True)
    os.chown(volume, USER, USER)  # as a named volume, which gets the owner of the image's folder
    make = ["python3", "-m", "tests.random_weights", "/models", "--weights", args.weights]
    made = Container(volume, logs / "download.log", make, {})
    assert made.wait(LOAD_SECONDS) == 0, made.log.read_text()
    for stack in args.stack:
        try_stack(stack, volume, logs, args.device)


if __name__ == "__main__":
    main()
