"""The image `cpu` without compose and without a network: it ends when it is told to, and the stages run in it."""

import json
import time
from typing import Any

import pytest

from tests.containers.engine import Engine
from tests.containers.images import CPU
from tests.containers.project import wait_for

DIT = ("bash", "run_stepaudio2_dit_token2wav.sh")
SBOM = "/usr/local/share/sbom.cdx.json"
MANIFEST = "from cosyvoice_triton import samples; print(samples.MANIFEST)"


def test_the_image_alone_ends_soon_while_it_prepares_the_demo(docker: Engine) -> None:
    """Without compose's `init` its shell is process 1, which has no default action for SIGTERM."""
    docker.docker("run", "--detach", "--name=alone", "--network=none", CPU)
    time.sleep(3)  # into the preparation, which takes ten
    start = time.monotonic()
    docker.docker("stop", "--time=60", "alone")
    assert time.monotonic() - start < 40
    state = json.loads(docker.docker("inspect", "alone"))[0]["State"]
    docker.docker("rm", "--volumes", "alone")
    assert state["ExitCode"] == 143


def test_the_image_holds_the_package_and_no_sources_and_lists_what_it_holds(docker: Engine) -> None:
    image = json.loads(docker.docker("inspect", CPU))[0]["Config"]
    assert image["User"] == "1001" and image["Healthcheck"]["Test"][:2] == ["CMD", "cosyvoice-triton"]
    assert image["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    printed = docker.docker("run", "--rm", "--network=none", CPU, "sh", "-c", f"ls; cat {SBOM}")
    files, _, sbom = printed.partition("{")
    assert files.split() == ["LICENSE", "run.sh", "run_cosyvoice3.sh", "run_stepaudio2_dit_token2wav.sh", "scripts"]
    listed = {one["purl"].rpartition("@")[0] for one in json.loads("{" + sbom)["components"]}
    assert listed >= {"pkg:pypi/cosyvoice-triton", "pkg:pypi/nvidia-pytriton", "pkg:deb/debian/gcc"}


def test_prompt_caches_see_the_containers_limit_of_memory(docker: Engine) -> None:
    code = "from cosyvoice_triton.token2wav.gpu.memory import host_memory; print(host_memory())"
    limited = docker.docker("run", "--rm", "--network=none", "--memory=1g", CPU, "python3", "-c", code)
    assert int(limited) == 1 << 30


@pytest.mark.extended
def test_the_image_alone_prepares_the_demo_and_serves_it(docker: Engine) -> None:
    docker.docker("run", "--detach", "--name=demo", "--network=none", "--shm-size=1g", CPU)

    def state() -> dict[str, Any]:
        return dict(json.loads(docker.docker("inspect", "demo"))[0]["State"])

    wait_for("the image alone", lambda: state()["Health"]["Status"] == "healthy" or not state()["Running"])
    assert state()["Running"], docker.docker("logs", "demo")
    docker.docker("stop", "--time=90", "demo")
    assert state()["ExitCode"] == 0
    docker.docker("rm", "--volumes", "demo")


@pytest.mark.extended
def test_the_stages_give_a_server_and_ask_it(docker: Engine) -> None:
    """As the documents have them, where they stand in the image, as its user."""
    manifest = docker.docker("run", "--rm", "--network=none", CPU, "python3", "-c", MANIFEST).strip()
    data = f"--env=DATA=--manifest-path {manifest} --num-requests 2"
    options = ("--detach", "--name=stages", "--network=none", "--shm-size=1g", "--env=LOCAL=1", data)
    docker.docker("run", *options, CPU, *DIT, "0", "3")

    def printed() -> str:
        return docker.docker("logs", "stages")

    def state() -> dict[str, object]:
        return dict(json.loads(docker.docker("inspect", "stages"))[0]["State"])

    wait_for("stages 0 to 3", lambda: "serving; Ctrl-C" in printed() or not state()["Running"], 400)
    assert state()["Running"], printed()
    assert docker.docker("exec", "stages", "id", "-u") == "1001"
    docker.docker("exec", "stages", *DIT, "4", "4", limit=300)
    docker.docker("exec", "stages", "ls", "out/dit/grpc_streaming_2_tasks/summary.json")
    docker.docker("exec", "stages", "cosyvoice-triton", "bench", "--help")
    docker.docker("stop", "--time=60", "stages")
    assert state()["ExitCode"] == 143
    docker.docker("rm", "stages")
