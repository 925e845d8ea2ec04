"""The other stacks and images: docker-compose.yml with deploy/compose/cpu.yml, whole utterances over gRPC, HTTP and the
speech API; docker-compose.dit.yml on the image `gpu`, whose engine of the LLM computes on the CPU, too; the image `cpu`
without compose and without a network; docker-compose.cosyvoice3.yml.
"""

import base64
import json
import time
from collections.abc import Callable

import numpy as np
import pytest
from cosyvoice_triton.cli.client_http import synthesize
from cosyvoice_triton.client.failures import ClientError
from cosyvoice_triton.client.utterance import Utterance, of_recording, read_reference

from tests.containers.engine import Engine
from tests.containers.images import CPU
from tests.containers.project import SECONDS, VOICE, Project, wait_for
from tests.support.server_requests import VOICE as RECORDING
from tests.support.server_requests import VOICE_TEXT, assert_speech, stream

SBOM = "/usr/local/share/sbom.cdx.json"


def test_one_answer_per_request_over_every_protocol(project: Callable[..., Project]) -> None:
    unet = project("docker-compose.yml", "deploy/compose/cpu.yml", TTS_OFFLINE="1")
    unet.up()
    wait_for("the unet stack, until all are healthy", lambda: all(map(unet.healthy, ("tts", "gateway", "speech"))))
    server, results = f"127.0.0.1:{unet.ports['HTTP_PORT']}", []

    def answered() -> bool:
        try:
            results.append(synthesize(server, "cosyvoice2", Utterance("Hello there.", speaker=VOICE), 60.0))
        except ClientError as error:  # on a loaded machine a healthy server may be late for a check
            assert "no speech server is ready" in str(error)
        return bool(results)

    wait_for("an answer over HTTP", answered)
    (result,) = results
    assert result.waveform.size > 10_000 and np.abs(result.waveform).max() > 0.01
    status, audio = unet.say()
    assert status == 200 and audio[:4] == b"RIFF" and len(audio) > 20_000


@pytest.mark.extended
def test_the_image_for_gpus_serves_what_it_serves_without_settings(project: Callable[..., Project]) -> None:
    started = project("docker-compose.dit.yml", "tests/containers/no_gpu.yml")
    started.up("tts", "gateway")
    assert not started.exists("engine") and not started.exists("llm")
    wait_for("dit on the image gpu", lambda: started.servers() == 1)
    answer = started.spoken("cosyvoice2_dit")
    assert not answer.error and answer.samples > 10_000


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
def test_cosyvoice3_answers_over_grpc_and_the_speech_api(project: Callable[..., Project]) -> None:
    cosyvoice3 = project("docker-compose.cosyvoice3.yml", "deploy/compose/cpu.yml")
    cosyvoice3.up()
    wait_for("cosyvoice3, until all are healthy", lambda: all(map(cosyvoice3.healthy, ("tts", "gateway", "speech"))))
    utterance = Utterance("Hello there.", reference_text=VOICE_TEXT, **of_recording(read_reference(RECORDING)))
    assert_speech(stream(f"127.0.0.1:{cosyvoice3.ports['GRPC_PORT']}", "cosyvoice3", utterance, SECONDS))
    recording = base64.b64encode(RECORDING.read_bytes()).decode()
    status, audio = cosyvoice3.say(ref_audio=recording, ref_text=VOICE_TEXT)
    assert status == 200 and audio[:4] == b"RIFF" and len(audio) > 5_000
