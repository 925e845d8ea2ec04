"""The image `cpu` without compose and without a network: it ends when it is told to, and the stages run in it."""

import json
import time

from tests.containers.engine import Engine
from tests.containers.images import CPU

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
