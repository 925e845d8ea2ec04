"""docker-compose.yml with deploy/compose/cpu.yml: whole utterances over gRPC, HTTP and the speech API."""

from collections.abc import Callable

import numpy as np
from cosyvoice_triton.client.failures import ClientError
from cosyvoice_triton.client.http_client import synthesize
from cosyvoice_triton.client.utterance import Utterance

from tests.containers.project import VOICE, Project, wait_for

MODEL = "cosyvoice2"


def test_one_answer_per_request_over_every_protocol(project: Callable[..., Project]) -> None:
    unet = project("docker-compose.yml", "deploy/compose/cpu.yml", TTS_OFFLINE="1")
    unet.up()
    wait_for("the unet stack, until all are healthy", lambda: all(map(unet.healthy, ("tts", "gateway", "speech"))))
    server, results = f"127.0.0.1:{unet.ports['HTTP_PORT']}", []

    def answered() -> bool:
        try:
            results.append(synthesize(server, MODEL, Utterance("Hello there.", speaker=VOICE), 60.0))
        except ClientError as error:  # on a loaded machine a healthy server may be late for a check
            assert "no speech server is ready" in str(error)
        return bool(results)

    wait_for("an answer over HTTP", answered)
    (result,) = results
    assert result.waveform.size > 10_000 and np.abs(result.waveform).max() > 0.01
    status, audio = unet.say()
    assert status == 200 and audio[:4] == b"RIFF" and len(audio) > 20_000
